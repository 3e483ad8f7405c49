"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it: 4 or 8 bits in groups, act-order too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import SCALES, check_shape, check_type, modules
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout, pack

VERSIONS = ("gptq", "gptq_v2")
"""Values of `checkpoint_format`: the first stores zero points less one, modulo their bits."""
BITS = (4, 8)


class Gptq(WeightFormat[NoOptions]):
    """``x.qweight`` int32 [cols x bits / 32, rows], ``x.qzeros`` int32 [groups, rows x bits / 32], ``x.scales``
    [groups, rows] and ``x.g_idx`` int32 [cols], the group of each column.
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        if reason := ctx.other_method("gptq"):
            return reason
        version = str(ctx.config.get("checkpoint_format") or "gptq").lower()
        if version not in VERSIONS:
            return f"its checkpoint_format is {version}, and supported are {', '.join(VERSIONS)}"
        bits = ctx.config.get("bits", 4)
        return None if bits in BITS else f"it has {bits!r:.80} bits, and 4 and 8 are supported"

    def matrices(self) -> Mapping[str, CodedMatrix]:
        return {f"{module}.weight": self._matrix(module, codes) for module, codes in modules(self.ctx, "qweight")}

    def _matrix(self, module: str, codes: StoredSlot) -> CodedMatrix:
        scales = check_type(self.ctx.need(f"{module}.scales", codes.name), *SCALES)
        zeros = check_type(self.ctx.need(f"{module}.qzeros", codes.name), torch.int32)
        check_type(codes, torch.int32)
        if len(codes.shape) != 2 or len(scales.shape) != 2:
            raise codes.wrong(f"and scales {list(scales.shape)} should have two dimensions")
        each = 8 if self.ctx.config.get("bits", 4) == 4 else 4
        cols, (groups, rows) = each * codes.shape[0], scales.shape
        check_shape(codes, cols // each, rows)
        check_shape(zeros, groups, -(-rows // each))
        layout, slots = self._order(module, (rows, cols), scales, each)
        return CodedMatrix(
            layout, (rows, cols), codes, _canonical(each), {**slots, "zeros": zeros}, self._blocks(each, rows)
        )

    def _order(
        self, module: str, shape: tuple[int, int], scales: StoredSlot, each: int
    ) -> tuple[Layout, dict[str, StoredSlot]]:
        """Return the layout: columns have an order of their own where `g_idx` is not that of neighbours."""
        code, cols, groups = Code.UINT4 if each == 8 else Code.UINT8, shape[1], scales.shape[0]
        if not groups or cols % groups:
            raise scales.wrong(f"does not divide {cols} columns into groups of one size")
        block = (1, cols // groups)
        order = self.ctx.tensors.get(f"{module}.g_idx")
        if order is not None:
            check_shape(check_type(order, torch.int32), cols)
            if not torch.equal(order.read(), torch.arange(cols, dtype=torch.int32) // block[1]):
                return Layout(code, block, zeros=True, ordered=True), {"scales": scales, "groups": order}
        return Layout(code, block, zeros=True), {"scales": scales}

    def unused(self) -> list[str]:
        """Return `g_idx`, whether it is read or not."""
        return [slot.name for _, slot in modules(self.ctx, "g_idx")]

    def _blocks(self, each: int, rows: int) -> Callable[[Mapping[str, Tensor]], Blocks]:
        first = str(self.ctx.config.get("checkpoint_format") or "gptq").lower() == VERSIONS[0]
        symmetric = bool(self.ctx.config.get("sym"))
        middle = 8 if each == 8 else 128

        def blocks(tensors: Mapping[str, Tensor]) -> Blocks:
            zeros = _numbers(tensors["zeros"], each)[:, :rows]
            # Zero points of symmetric weights are known, and files do not always say which version they are.
            stored_less_one = bool((zeros == middle - 1).all()) or (first and not bool((zeros == middle).all()))
            if stored_less_one if symmetric else first:
                zeros = (zeros + 1) & (2 * middle - 1)
            scales = tensors["scales"].t().contiguous()
            return Blocks(scales, zeros.t().contiguous(), tensors.get("groups"))

        return blocks


def _canonical(each: int) -> Callable[[Tensor], Tensor]:
    def canonical(qweight: Tensor) -> Tensor:
        numbers = _numbers(qweight.t().contiguous(), each)
        return pack(numbers) if each == 8 else numbers

    return canonical


def _numbers(packed: Tensor, each: int) -> Tensor:
    """Return the `each` unsigned numbers of every int32 of [n, words], the low bits first: uint8 [n, each x words]."""
    as_bytes = packed.contiguous().view(torch.uint8)
    return as_bytes if each == 4 else torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)
