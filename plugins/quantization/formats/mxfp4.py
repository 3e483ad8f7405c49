"""Experts in the 4-bit floats of the OCP Microscaling Formats, as gpt-oss has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import check_shape, check_type, powers_of_two
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout

CODES, SCALES = "_blocks", "_scales"
BLOCK = 32


class MxFp4(WeightFormat[NoOptions]):
    """``x_blocks`` uint8 [experts, rows, cols / 32, 16] and ``x_scales`` uint8 [experts, rows, cols / 32] stand for x
    [experts, cols, rows], a matrix for each expert with its input sizes first.
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        return ctx.other_method("mxfp4")

    def matrices(self) -> Mapping[str, CodedMatrix]:
        found = {
            name.removesuffix(CODES): self._matrix(name.removesuffix(CODES), codes)
            for name, codes in self.ctx.tensors.items()
            if name.endswith(CODES)
        }
        for name, slot in self.ctx.tensors.items():
            if name.endswith(SCALES) and name.removesuffix(SCALES) not in found:
                raise slot.wrong(f"has no codes beside it, which would be {name.removesuffix(SCALES)}{CODES}")
        return found

    def _matrix(self, name: str, codes: StoredSlot) -> CodedMatrix:
        check_type(codes, torch.uint8)
        if len(codes.shape) != 4 or codes.shape[3] != BLOCK // 2:
            raise codes.wrong(f"should have the shape [experts, rows, columns / {BLOCK}, {BLOCK // 2}]")
        experts, rows, blocks, _ = codes.shape
        scales = check_type(self.ctx.need(f"{name}{SCALES}", codes.name), torch.uint8, torch.float8_e8m0fnu)
        check_shape(scales, experts, rows, blocks)
        cols = blocks * BLOCK
        return CodedMatrix(
            Layout(Code.E2M1, (1, BLOCK)), (experts, cols, rows), codes,
            unpack=lambda packed: packed.reshape(experts * rows, cols // 2),
            slots={"scales": scales},
            blocks=lambda tensors: Blocks(powers_of_two(tensors["scales"]).reshape(experts * rows, blocks)),
            arrange=lambda matrix: matrix.view(experts, rows, cols).transpose(1, 2),
        )  # fmt: skip
