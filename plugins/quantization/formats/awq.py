"""AWQ (Lin et al. 2023) as AutoAWQ writes it: 4 bits in groups, with zero points."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import SCALES, check_shape, check_type, modules
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout, pack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each 4 bits of an int32 are, from the lowest on."""


class Awq(WeightFormat[NoOptions]):
    """``x.qweight`` int32 [cols, rows / 8], ``x.qzeros`` int32 [groups, rows / 8] and ``x.scales`` [groups, rows]."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        if reason := ctx.other_method("awq"):
            return reason
        version, bits = str(ctx.config.get("version") or "gemm").lower(), ctx.config.get("bits", 4)
        if version != "gemm":
            return f"its version is {version}, and only gemm is supported"
        return None if bits == 4 else f"it has {bits!r:.80} bits, and 4 are supported"

    def matrices(self) -> Mapping[str, CodedMatrix]:
        return {f"{module}.weight": self._matrix(module, codes) for module, codes in modules(self.ctx, "qweight")}

    def _matrix(self, module: str, codes: StoredSlot) -> CodedMatrix:
        scales = check_type(self.ctx.need(f"{module}.scales", codes.name), *SCALES)
        zeros = check_type(self.ctx.need(f"{module}.qzeros", codes.name), torch.int32)
        check_type(codes, torch.int32)
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise codes.wrong(f"and scales {list(scales.shape)} should have two dimensions")
        cols, rows, groups = codes.shape[0], 8 * codes.shape[1], scales.shape[0]
        if not groups or cols % groups or cols % 2:
            raise scales.wrong(f"does not divide {cols} columns into groups of one size")
        check_shape(scales, groups, rows)
        check_shape(zeros, groups, rows // 8)
        layout = Layout(Code.UINT4, (1, cols // groups), zeros=True)
        return CodedMatrix(layout, (rows, cols), codes, _canonical, {"scales": scales, "zeros": zeros}, _blocks)


def _canonical(qweight: Tensor) -> Tensor:
    return pack(_numbers(qweight).t().contiguous())


def _blocks(tensors: Mapping[str, Tensor]) -> Blocks:
    return Blocks(tensors["scales"].t().contiguous(), _numbers(tensors["zeros"]).t().contiguous())


def _numbers(packed: Tensor) -> Tensor:
    """Return what int32 [n, words] have, uint8 [n, 8 words]."""
    found = torch.empty(*packed.shape, 8, dtype=torch.uint8, device=packed.device)
    for place, number in enumerate(ORDER):
        found[..., number] = packed >> (4 * place) & 15
    return found.flatten(-2)
