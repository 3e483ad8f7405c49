"""Quantised weights that stay codes in transformers' modules; `tests/plugins/quantization` compares their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.experts import fits_codes, is_experts, keeps_codes
from pegboard.plugins.model_transformers.family import relative_errors
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.mxfp4 import MxFp4
from pegboard.toolkit.kernels.launch import Launch, observed
from pegboard.toolkit.model.coded import slots_of
from tests.e2e.reference import forced_logits
from tests.plugins.model_transformers.test_experts import experts_of
from tests.plugins.quantization.published import WRITERS, mxfp4, published, tiny
from tests.plugins.quantization.test_libraries import gpt_oss
from tests.plugins.quantization.test_served import PLAIN, TEXT, engine

TORCH: dict[str, Any] = {"quantization": {"linear": {"use": "torch"}}}


def network_of(directory: Path, **sections: Any) -> TransformersNetwork:
    with engine(directory, use="transformers", **{**PLAIN, **sections}) as made:
        network = made.built.runner.ctx.network
    assert isinstance(network, TransformersNetwork)
    return network


@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "bnb nf4"])
def test_linear_layers_stay_codes(name: str, tmp_path: Path) -> None:
    """Queries, keys and values in one product, and gate and up; nothing has weights of its own."""
    source = tiny(tmp_path / "plain")
    coded, _ = published(tmp_path / "coded", source, WRITERS[name])
    network = network_of(coded, **TORCH)
    groups = network.replaced.groups
    assert [len(group.linears) for group in groups] == [3, 1, 2, 1] * 2
    assert all(group.product.coded for group in groups)
    assert all(linear.weight.numel() == 0 for group in groups for linear in group.linears)
    kept = sum(parameter.nbytes for parameter in network.model.parameters())
    plain = network_of(source)
    assert kept < 0.3 * sum(parameter.nbytes for parameter in plain.model.parameters())


def test_a_part_that_is_plain_is_a_product_of_its_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    coded, meant = published(tmp_path / "coded", tiny(tmp_path / "plain"), WRITERS["fp8 blocks"])
    tensors, exact = (load_file(there / "model.safetensors") for there in (coded, meant))
    name = "model.layers.1.self_attn.k_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = exact[name]
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    network = network_of(coded)
    assert [(len(group.linears), group.product.coded) for group in network.replaced.groups][4:6] == [
        (2, True),
        (1, True),
    ]
    assert network.model.get_submodule(name.removesuffix(".weight")).weight.numel() > 0


def test_experts_stay_codes(tmp_path: Path, interpreted_triton: None) -> None:
    """Of gpt-oss, in one launch a product: Triton's sums, in float32."""
    coded, plain = gpt_oss(tmp_path)
    launched: list[str] = []

    def note(launch: Launch) -> bool:
        launched.append(str(getattr(launch.kernel, "__name__", "")))
        return True

    text = TEXT[:12]
    with engine(plain, use="transformers", **PLAIN) as made:
        expected = forced_logits(made, text, 4)
    sections = {**PLAIN, "quantization": {"linear": {"use": "triton"}}}
    with engine(coded, use="transformers", **sections) as made:
        with observed(note):
            found = forced_logits(made, text, 4)
        network = made.built.runner.ctx.network
    assert isinstance(network, TransformersNetwork)
    modules = [module for module in network.model.modules() if is_experts(module)]
    assert len(modules) == 3
    assert all(keeps_codes(module) and module.gate_up_proj.numel() == 0 for module in modules)
    assert network.capture_objection() is None
    names = [name for name in launched if "expert" in name or "product" in name]
    assert len(names) == 2 * len(modules), launched
    assert float(relative_errors(found, expected).max()) < TOLERANCE


def test_experts_that_are_counted_on_the_host(tmp_path: Path) -> None:
    """A provider that multiplies them one by one."""
    reason = network_of(gpt_oss(tmp_path)[0], **TORCH).capture_objection()
    assert reason is not None
    assert reason.startswith("model.layers.0.mlp.experts: experts are multiplied one by one")


@pytest.mark.parametrize(("name", "fits"), [("gpt_oss", True), ("mixtral", False)])
def test_rows_of_codes_are_outputs(name: str, fits: bool, tmp_path: Path) -> None:
    """MXFP4 stands for weights with inputs first, which Mixtral's are not."""
    module = experts_of(name, "eager")
    assert is_experts(module)
    tensors: dict[str, torch.Tensor] = {}
    for part in ("gate_up_proj", "down_proj"):
        count, one, other = getattr(module, part).shape
        rows, cols = (other, one) if fits else (one, other)
        packed, exponents, _ = mxfp4(np.ones((count * rows, cols)), np.random.default_rng(0))
        tensors[f"x.{part}_blocks"] = packed.view(count, rows, cols // 32, 16)
        tensors[f"x.{part}_scales"] = exponents.view(count, rows, cols // 32)
    save_file(tensors, tmp_path / "model.safetensors")
    ctx = FormatContext({"quant_method": "mxfp4"}, slots_of(tmp_path))
    matrices = MxFp4(NoOptions(), ctx).matrices()
    assert fits_codes("x", module, matrices) == fits
    assert not fits_codes("y", module, matrices)
    assert not fits_codes("x", module, {"x.down_proj": matrices["x.down_proj"]})
