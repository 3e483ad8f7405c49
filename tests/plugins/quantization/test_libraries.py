"""Numbers of MXFP4 as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.mxfp4 import MxFp4
from pegboard.toolkit.model.coded import slots_of


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
