"""Ranks: processes that compute one network together, each a share of every matrix, and this one's place among them.

A plugin brings them as the service `ranks` of `ModelContext`; without one a network is computed by one process. Large
matrices are cut by rows or by columns, so that all ranks hold the same hidden states after every layer (Shoeybi et al.
2019, Megatron-LM).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.sections import Sections

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.model_family import ModelContext

SERVICE = "ranks"
"""Name of the `Ranks` in `ModelContext.services`."""

PENDING = "ranks.pending"
"""Name in `ForwardBatch.extras` that says that only rank 0 knows all ids of the batch's tokens."""

ROWS = 64
"""Each rank has a multiple of so many rows of the vocabulary."""


class Collectives(Protocol):
    """What ranks do together: all of them call the same, in the same order, with tensors of the same shape."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, the same bits on each of them. May change x and return it."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Return all ranks' x [n, m] side by side [n, ranks * m] on rank 0; None on the others."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x. May change x and return it."""

    @property
    def shares_memory(self) -> bool:
        """Whether it has `region` and `check_others`."""

    def region(self, nbytes: int) -> Tensor:
        """Return memory uint8 [nbytes] that all ranks map, zeros at first. Each call returns another one."""

    def check_others(self, waited: float) -> None:
        """Raise if another rank has ended, or if `waited`, the seconds that native code has waited in a region, are too
        many.
        """


class Cut(NamedTuple):
    """A rank's share of the `full` rows, or columns, of a matrix: `length` of them from `start` on."""

    start: int
    length: int
    full: int


class Ranks:
    """Rank `index` of `size`, those that compute one section of layers: all layers, unless `sections` says otherwise.
    What ranks do together needs `connect` first.
    """

    def __init__(self, size: int = 1, index: int = 0, sections: Sections | None = None) -> None:
        self.size = size
        self.index = index
        self.sections = sections or Sections()
        self._together: Collectives | None = None

    def connect(self, together: Collectives) -> None:
        """Take what ranks do together from here on."""
        self._together = together

    @property
    def share_memory(self) -> bool:
        """Whether what ranks do together has memory that all of them map."""
        return self._together is not None and self._together.shares_memory

    @property
    def together(self) -> Collectives:
        """What ranks do together. Raises RuntimeError where they are not connected."""
        if self._together is None:
            raise RuntimeError(f"rank {self.index} of {self.size} is not connected to the others")
        return self._together

    def cut(self, full: int, unit: int = 1) -> Cut:
        """Return this rank's share of rows that stay together by `unit`. Where there are fewer units than ranks,
        several ranks have the same one. Raises ModelError where neither number divides by the other.
        """
        units = full // unit
        if units % self.size == 0:
            count = units // self.size
            return Cut(self.index * count * unit, count * unit, full)
        if self.size % units == 0:
            return Cut(self.index * units // self.size * unit, unit, full)
        raise ModelError(f"{units} units of {unit} rows do not divide by {self.size} ranks")

    def vocabulary(self, size: int) -> Cut:
        """Return this rank's share of a vocabulary: the last shares may be smaller than `vocabulary_rows`, or empty."""
        rows = self.vocabulary_rows(size)
        start = min(self.index * rows, size)
        return Cut(start, min(rows, size - start), size)

    def vocabulary_rows(self, size: int) -> int:
        """Return the rows of a vocabulary that each rank keeps, padding included; without padding where it is alone."""
        return size if self.size == 1 else -(-size // (ROWS * self.size)) * ROWS

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, in float32, rounded to x's type once. May change x."""
        if self.size == 1:
            return x
        return self.together.all_reduce(x.float()).to(x.dtype)

    def gather(self, x: Tensor) -> Tensor | None:
        """Return all ranks' x [n, m] side by side on rank 0; None on the others."""
        return x if self.size == 1 else self.together.gather(x)

    def logits(self, own: Tensor, vocab: int) -> Tensor:
        """Return the logits float32 [n, vocab] on rank 0, of which each rank has some columns. Other ranks get numbers
        without a meaning.
        """
        if self.size == 1:
            return own
        found = self.gather(own)
        return nothing(len(own), vocab, own) if found is None else found[:, :vocab]

    def known(self, batch: ForwardBatch) -> None:
        """Give all ranks of the first section the ids of a batch's tokens, where only rank 0 knows them."""
        if self.size > 1 and self.sections.first and PENDING in batch.extras:
            batch.input_ids = self.together.broadcast(batch.input_ids)


def ranks_of(ctx: ModelContext) -> Ranks:
    """Return the ranks that compute a model together: those of a plugin, or this process alone."""
    found = ctx.services.get(SERVICE)
    return found if isinstance(found, Ranks) else Ranks()


def alone(ctx: ModelContext) -> str | None:
    """Return None where one process computes a model, else what something has against ranks that does not know them."""
    ranks = ranks_of(ctx)
    for key, count in (("tensor", ranks.size), ("pipeline", ranks.sections.count)):
        if count > 1:
            return f"it computes on one rank, and parallel.{key} is {count}"
    return None


def nothing(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return logits float32 [rows, columns] whose numbers have no meaning: for ranks that do not sample."""
    return torch.empty(rows, columns, dtype=torch.float32, device=like.device)
