"""Codes as a GGUF file had them, which Pegboard's own conversion keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import check_alone, check_type, modules
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout


class KeptCodes(WeightFormat[NoOptions]):
    """``x.codes``: uint8 [rows, cols / 2] are numbers of 4 bits that stand for 8 less, the first in the low bits, int8
    [rows, cols] are themselves. ``x.scales`` float16 [rows, groups].
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        return ctx.other_method("pegboard")

    def matrices(self) -> Mapping[str, CodedMatrix]:
        found = {f"{module}.weight": self._matrix(module, codes) for module, codes in modules(self.ctx, "codes")}
        check_alone(self.ctx, "scales", found)
        return found

    def _matrix(self, module: str, codes: StoredSlot) -> CodedMatrix:
        scales = check_type(self.ctx.need(f"{module}.scales", codes.name), torch.float16)
        check_type(codes, torch.uint8, torch.int8)
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise codes.wrong(f"and scales {list(scales.shape)} should have two dimensions")
        code = Code.INT4 if codes.dtype == torch.uint8 else Code.INT8
        rows, cols, groups = codes.shape[0], codes.shape[1] * (2 if code.packed else 1), scales.shape[1]
        if scales.shape[0] != rows or not groups or cols % groups:
            raise scales.wrong(f"does not fit a matrix {[rows, cols]} in groups of one size")
        layout = Layout(code, (1, cols // groups))
        return CodedMatrix(layout, (rows, cols), codes, slots={"scales": scales}, blocks=_blocks)


def _blocks(tensors: Mapping[str, Tensor]) -> Blocks:
    return Blocks(tensors["scales"])
