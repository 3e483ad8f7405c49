"""Weights in float8 with a scale per tensor, per row or per block, as DeepSeek, Qwen and FBGEMM publish them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import FLOAT8, SCALES, check_alone, check_type, modules, powers_of_two
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout

METHODS = ("fp8", "fbgemm_fp8")
NAMES = ("weight_scale_inv", "weight_scale", "scale")
"""What the tensor of scales is called. All of them are multiplied by, whatever `inv` suggests."""
UNUSED = ("input_scale", "activation_scale", "input_scale_ub")
"""Scales of activations, which stay in the model's type here."""


class Fp8(WeightFormat[NoOptions]):
    """``x.weight`` float8 [rows, cols], and its scales: one, [rows], [rows, 1] or [rows / 128, cols / 128]."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        return ctx.other_method(*METHODS)

    def matrices(self) -> Mapping[str, CodedMatrix]:
        found = {
            f"{module}.weight": self._matrix(module, codes)
            for module, codes in modules(self.ctx, "weight")
            if codes.dtype in FLOAT8 and len(codes.shape) == 2
        }
        for name in NAMES[:2]:
            check_alone(self.ctx, name, found)
        return found

    def unused(self) -> Collection[str]:
        return [name for name in self.ctx.tensors if name.rpartition(".")[2] in UNUSED]

    def _matrix(self, module: str, codes: StoredSlot) -> CodedMatrix:
        names = [f"{module}.{one}" for one in NAMES]
        name = next((one for one in names if one in self.ctx.tensors), names[0])
        scales = self.ctx.need(name, codes.name)
        return float8_matrix(codes, scales, _block(self.ctx.config))


def float8_matrix(codes: StoredSlot, scales: StoredSlot, block: tuple[int, int]) -> CodedMatrix:
    """Return a matrix in float8 whose scales are for all of it, for rows or for blocks; the shape tells. Raises
    ModelError for other shapes.
    """
    code = Code.E4M3 if codes.dtype == FLOAT8[0] else Code.E5M2
    rows, cols = codes.shape
    layout = _layout(code, (rows, cols), scales, block)

    def blocks(tensors: Mapping[str, Tensor]) -> Blocks:
        return Blocks(powers_of_two(tensors["scales"]).reshape(layout.grid(rows, cols)))

    return CodedMatrix(layout, codes.shape, codes, slots={"scales": scales}, blocks=blocks)


def _layout(code: Code, shape: tuple[int, int], scales: StoredSlot, block: tuple[int, int]) -> Layout:
    import torch

    check_type(scales, *SCALES, torch.uint8, torch.float8_e8m0fnu)
    (rows, cols), found = shape, scales.shape
    if found in ((), (1,), (1, 1)):
        return Layout(code, (rows, 0))
    if found in ((rows,), (rows, 1)):
        return Layout(code, (1, 0))
    layout = Layout(code, block)
    down, across = layout.grid(rows, cols)
    if found not in ((down, across), (down, 1, across, 1)):
        raise scales.wrong(
            f"does not fit a matrix {[rows, cols]}: its scales are one, {[rows, 1]} for rows, or "
            f"{[down, across]} for blocks of {block[0]} x {block[1]}"
        )
    return layout


def _block(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    size = config.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
        return size[0], size[1]
    return 128, 128
