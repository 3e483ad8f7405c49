"""Products with weights that were dequantised at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pegboard.plugins.quantization.api import LinearContext, Linears
from pegboard.plugins.quantization.options import DenseOptions
from pegboard.toolkit.model.experts import ExpertsMethod, PlainExperts
from pegboard.toolkit.model.layouts import Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Site
from pegboard.toolkit.model.packed import pack, packed_linear, why_not_packed


class Dense(Linears[DenseOptions]):
    """Keeps the exact weights in the model's type, packed by oneDNN where that pays; experts never are."""

    @classmethod
    def supports(cls, options: DenseOptions, ctx: LinearContext) -> str | None:
        if ctx.device.type == "cpu" or options.on_gpu:
            return None
        return (
            "on a GPU it takes the memory that quantised weights save; set quantization.linear.on_gpu: true to have it"
        )

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        weight = torch.cat([exact(layout, codes, self.ctx.dtype) for layout, codes in parts])
        if why_not_packed(self.ctx.dtype, self.ctx.device) is not None:
            return _Plain(weight)
        return _Packed(weight)

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        weights = torch.empty(len(experts), site.rows, site.cols, dtype=self.ctx.dtype, device=self.ctx.device)
        for weight, parts in zip(weights, experts, strict=True):
            torch.cat([exact(layout, codes, self.ctx.dtype) for layout, codes in parts], out=weight)
        return PlainExperts(weights)


class _Plain(LinearMethod):
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self._weight, bias)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


class _Packed(LinearMethod):
    def __init__(self, weight: Tensor) -> None:
        self._packed, self._bytes = pack(weight), weight.nbytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, self._packed, bias)

    @property
    def nbytes(self) -> int:
        return self._bytes
