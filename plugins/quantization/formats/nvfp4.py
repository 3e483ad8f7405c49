"""NVFP4, of ModelOpt and llm-compressor: 4-bit floats, a float8 scale for 16 of them and a float32 one for a matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pegboard.plugins.quantization.formats.parts import check_shape, check_type
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout

BLOCK = 16


def nvfp4_matrix(codes: StoredSlot, scales: StoredSlot, overall: StoredSlot, *, divided: bool) -> CodedMatrix:
    """Return a matrix of codes uint8 [rows, cols / 2], scales float8_e4m3fn [rows, cols / 16] and `overall`, a float32
    by which scales are multiplied, or `divided`, in float32. Raises ModelError for other types and shapes.
    """
    check_type(codes, torch.uint8)
    if len(codes.shape) != 2:
        raise codes.wrong("should have two dimensions")
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    check_shape(check_type(scales, torch.float8_e4m3fn), rows, -(-cols // BLOCK))
    if check_type(overall, torch.float32).shape not in ((), (1,)):
        raise overall.wrong("should be one number")

    def blocks(tensors: Mapping[str, Tensor]) -> Blocks:
        factor = tensors["overall"].reshape(())
        if not bool(torch.isfinite(factor) & (factor > 0)):
            raise overall.wrong(f"has a scale of {factor.item()}; scales are positive and finite")
        each = tensors["scales"].float()
        return Blocks(each / factor if divided else each * factor)

    slots = {"scales": scales, "overall": overall}
    return CodedMatrix(Layout(Code.E2M1, (1, BLOCK)), (rows, cols), codes, slots=slots, blocks=blocks)
