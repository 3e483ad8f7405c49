"""The weights of experts: a matrix of one size for each, and what multiplies pairs of tokens and experts by them."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pegboard.toolkit.kernels.experts import Groups, product, why_it_waits
from pegboard.toolkit.model.linear import LinearMethod


class ExpertsMethod(abc.ABC):
    """The weights of a site with experts, kept as it likes, and the products with them."""

    @abc.abstractmethod
    def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        """Return for each position of `groups` a row of x times the transposed weights of its expert: [pairs, rows] in
        x's dtype. x [n, cols] has a row for each position, or if `gather` for each token.

        There may be no tokens, and rows of x may have gaps between them.
        """

    def why_it_waits(self) -> str | None:
        """Return None where what it asks of the device depends on shapes alone, so that it can be captured in a graph,
        or why it waits for the device instead.
        """
        return None

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""


class PlainExperts(ExpertsMethod):
    """Weights [experts, rows, cols] that are not quantised."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        return product(x, self._weights, None, groups, gather=gather)

    def why_it_waits(self) -> str | None:
        return why_it_waits(self._weights)

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes


class EachExpert(ExpertsMethod):
    """The product of each expert by itself: as many launches as there are experts that some token goes to, which the
    host has to know.
    """

    def __init__(self, methods: Sequence[LinearMethod], rows: int) -> None:
        self._methods = methods
        self._rows = rows

    def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        if gather:
            x = x.index_select(0, groups.rows)
        out = torch.empty(groups.pairs, self._rows, dtype=x.dtype, device=x.device)
        start = 0
        for method, end in zip(self._methods, groups.offsets.tolist(), strict=True):
            if end > start:
                out[start:end] = method.apply(x[start:end])
            start = end
        return out

    def why_it_waits(self) -> str | None:
        return "experts are multiplied one by one, and their tokens counted on the host"

    @property
    def nbytes(self) -> int:
        return sum(method.nbytes for method in self._methods)


class ExpertLinear(nn.Module):
    """One matrix per expert: `weight` [experts, rows, cols]. Where it is `coded`, it has no memory, and an
    ExpertsMethod takes its place before the first product.
    """

    def __init__(
        self, experts: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device, coded: bool = False
    ) -> None:
        super().__init__()
        where = "meta" if coded else device
        self.weight = nn.Parameter(torch.empty(experts, rows, cols, dtype=dtype, device=where), requires_grad=False)
        self._method: ExpertsMethod = PlainExperts(self.weight)

    def forward(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        return self._method.apply(x, groups, gather=gather)

    def use(self, method: ExpertsMethod) -> None:
        """Multiply by a method's weights. There is no target any more."""
        self._method = method
        del self.weight

    def why_it_waits(self) -> str | None:
        """See `ExpertsMethod.why_it_waits`."""
        return self._method.why_it_waits()
