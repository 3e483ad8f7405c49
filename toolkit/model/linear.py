"""Linear layers whose weights are not plain: what a network asks for, and what answers."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a product: a linear layer of the checkpoint, by its name in the network."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Site:
    """One product of a network: [tokens, cols] -> [tokens, rows of all parts]. `number` is unique in the network. The
    product of an `expert` is one of many, of which a pass computes a few.
    """

    number: int
    parts: tuple[Part, ...]
    cols: int
    expert: bool = False

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


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
