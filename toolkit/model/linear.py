"""Linear layers whose weights are not plain: what a network asks for, and what answers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a product: a linear layer of the checkpoint, by its name in the network."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Site:
    """One product of a network: [tokens, cols] -> [tokens, rows of all parts]. `number` is unique in the network. Where
    it has `experts`, there is a matrix of this size for each of them, and parts have a * for the expert's number.
    """

    number: int
    parts: tuple[Part, ...]
    cols: int
    experts: int = 0

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


SITES = "sites"
"""The name of `NetworkSites` in `ModelContext.services`."""


class NetworkSites:
    """Where a family says which sites its network has, once it is loaded. It is among the services of a model if what
    is added to their products (`ForwardBatch.additions`) may be wanted.
    """

    def __init__(self) -> None:
        self.all: tuple[Site, ...] = ()
        """Those whose products may be added to: no experts."""
        self.computed_by = ""
        """The name of the runner, if it computes the products itself and takes additions in a form of its own; "" where
        products are tensors of torch."""


def tell_sites(services: Mapping[str, object], sites: Iterable[Site], *, computed_by: str = "") -> None:
    """Say which sites a network has, where that is wanted. See NetworkSites."""
    wanted = services.get(SITES)
    if isinstance(wanted, NetworkSites):
        wanted.all, wanted.computed_by = tuple(sites), computed_by


class LinearMethod(abc.ABC):
    """The weights of a site, kept as it likes, and the product with them."""

    @abc.abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [tokens, cols] times the transposed weights, plus `bias` [rows]: [tokens, rows] in x's dtype.

        There may be no tokens, and rows of x may have gaps between them. What it asks of the device depends on shapes
        alone, so that it can be captured in a graph.
        """

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights."""
