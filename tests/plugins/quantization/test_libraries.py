"""Numbers of MXFP4 as transformers reads them, and a tiny gpt-oss in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.mxfp4 import MxFp4
from pegboard.toolkit.model.coded import slots_of
from tests.plugins.model_transformers.tiny import SERVED, save
from tests.plugins.quantization.published import mxfp4
from tests.plugins.quantization.test_served import logits


def test_mxfp4_is_as_transformers_has_it(tmp_path: Path) -> None:
    """All codes, and exponents from the smallest numbers of float32 to large ones: to the bit."""
    draw = np.random.default_rng(0)
    codes = torch.from_numpy(draw.integers(0, 256, (3, 40, 2, 16), dtype=np.uint8))
    scales = torch.from_numpy(draw.integers(20, 240, (3, 40, 2), dtype=np.uint8))
    save_file({"x_blocks": codes, "x_scales": scales}, tmp_path / "model.safetensors")
    (matrix,) = MxFp4(NoOptions(), FormatContext({"quant_method": "mxfp4"}, slots_of(tmp_path))).matrices().values()
    found = torch.empty(matrix.shape, dtype=torch.bfloat16)
    matrix.fill(found)
    assert torch.equal(found, convert_moe_packed_tensors(codes, scales))


def gpt_oss(directory: Path) -> tuple[Path, Path]:
    """Return a tiny gpt-oss with its experts in MXFP4, and one of the numbers that they mean."""
    name, fields = SERVED["gpt_oss"]
    plain = save(directory / "plain", name, {**fields, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300})
    write_tiny_tokenizer(plain)
    coded: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            coded[key] = meant[key] = tensor
            continue
        experts, cols, rows = tensor.shape
        matrix = tensor.transpose(1, 2).reshape(experts * rows, cols).double().numpy()
        packed, exponents, numbers = mxfp4(matrix, np.random.default_rng(0))
        coded[f"{key}_blocks"] = packed.view(experts, rows, cols // 32, 16)
        coded[f"{key}_scales"] = exponents.view(experts, rows, cols // 32)
        meant[key] = torch.from_numpy(numbers).view(experts, rows, cols).transpose(1, 2).float().contiguous()
    shutil.copytree(plain, directory / "coded")
    config = json.loads((plain / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "coded" / "config.json").write_text(json.dumps(config), "utf-8")
    for there, tensors in ((plain, meant), (directory / "coded", coded)):
        save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    return directory / "coded", plain


def test_gpt_oss_is_served(tmp_path: Path) -> None:
    """Experts in MXFP4, which transformers' own modules multiply by: bit by bit the logits of the exact weights."""
    coded, plain = gpt_oss(tmp_path)
    assert torch.equal(logits(coded, use="transformers"), logits(plain, use="transformers"))
