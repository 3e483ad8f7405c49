"""Products that dequantise a matrix each time: for any layout and any device, in the memory of the codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import Linears
from pegboard.toolkit.model.layouts import Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Site


class TorchProducts(Linears[NoOptions]):
    """Keeps the codes as they are. A product takes the memory of one matrix beside them."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        return _Coded(parts)


class _Coded(LinearMethod):
    def __init__(self, parts: Sequence[tuple[Layout, Codes]]) -> None:
        self._parts = tuple(parts)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, torch.cat([exact(layout, codes, x.dtype) for layout, codes in self._parts]), bias)

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for _, codes in self._parts)
