"""Weights as NVIDIA's ModelOpt exports them: float8, NVFP4 and MXFP8."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.fp8 import float8_matrix
from pegboard.plugins.quantization.formats.nvfp4 import nvfp4_matrix
from pegboard.plugins.quantization.formats.parts import FLOAT8, check_alone, modules
from pegboard.toolkit.model.coded import CodedMatrix, StoredSlot

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
UNUSED = ("input_scale",)


class ModelOpt(WeightFormat[NoOptions]):
    """``x.weight`` float8 [rows, cols] with ``x.weight_scale``: one number, [rows], [rows / 128, 1, cols / 128, 1], or
    powers of two uint8 [rows, cols / 32]. Or ``x.weight`` uint8 [rows, cols / 2], two 4-bit floats in each, with
    ``x.weight_scale`` float8 [rows, cols / 16] and ``x.weight_scale_2`` float32.
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        if reason := ctx.other_method("modelopt", "modelopt_fp4"):
            return reason
        algorithm = str(ctx.config.get("quant_algo") or "").upper()
        return (
            None if algorithm in ALGORITHMS else f"it reads quant_algo {', '.join(ALGORITHMS)}, not {algorithm!r:.80}"
        )

    def matrices(self) -> Mapping[str, CodedMatrix]:
        for _, slot in modules(self.ctx, "pre_quant_scale"):
            raise slot.wrong("scales the inputs of a matrix, which is not supported")
        found = {
            codes.name: self._matrix(module, codes)
            for module, codes in modules(self.ctx, "weight")
            if len(codes.shape) == 2 and codes.dtype in (*FLOAT8, torch.uint8)
        }
        for name in ("weight_scale", "weight_scale_2"):
            check_alone(self.ctx, name, found)
        return found

    def unused(self) -> Collection[str]:
        return [name for name in self.ctx.tensors if name.rpartition(".")[2] in UNUSED]

    def _matrix(self, module: str, codes: StoredSlot) -> CodedMatrix:
        scales = self.ctx.need(f"{module}.weight_scale", codes.name)
        if codes.dtype == torch.uint8:
            return nvfp4_matrix(codes, scales, self.ctx.need(f"{module}.weight_scale_2", codes.name), divided=False)
        return float8_matrix(codes, scales, (1, 32) if scales.dtype == torch.uint8 else (128, 128))
