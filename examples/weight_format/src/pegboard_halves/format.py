"""The format: which tensors make up a matrix, and what their numbers mean. README.md describes the tensors."""

from collections.abc import Mapping

import torch
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout, pack, unpack
from torch import Tensor


class Halves(WeightFormat[NoOptions]):
    """``x.halves`` uint8 [rows, cols / 2] and ``x.steps`` float16 [rows, groups]."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        return ctx.other_method("halves")

    def matrices(self) -> Mapping[str, CodedMatrix]:
        named = {name.removesuffix(".halves"): slot for name, slot in self.ctx.tensors.items()}
        return {f"{name}.weight": self._matrix(name, slot) for name, slot in named.items() if slot.name != name}

    def _matrix(self, name: str, codes: StoredSlot) -> CodedMatrix:
        steps = self.ctx.need(f"{name}.steps", codes.name)
        if (codes.dtype, steps.dtype, len(codes.shape), len(steps.shape)) != (torch.uint8, torch.float16, 2, 2):
            raise codes.wrong(f"and steps {steps.shape} should be uint8 and float16 of two dimensions")
        rows, cols, groups = codes.shape[0], 2 * codes.shape[1], steps.shape[1]
        if steps.shape[0] != rows or not groups or cols % groups:
            raise steps.wrong(f"does not fit a matrix {[rows, cols]} in groups of one size")
        layout = Layout(Code.INT4, (1, cols // groups))
        return CodedMatrix(layout, (rows, cols), codes, _canonical, {"scales": steps}, _blocks)


def _canonical(halves: Tensor) -> Tensor:
    """Neighbours share a byte in Pegboard: take the low bits of all bytes first, then the high ones."""
    return pack(unpack(halves).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1))


def _blocks(tensors: Mapping[str, Tensor]) -> Blocks:
    return Blocks(tensors["scales"])
