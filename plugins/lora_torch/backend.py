"""Adapters in torch: two products per site and adapter of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterBackend, AdapterContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.adapters.api import AdapterWeights, LowRank, Put

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [start, stop) of a product get columns [first, last) of the small product times `b` [rank, rows]."""

    start: int
    stop: int
    first: int
    last: int
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Product:
    """What an adapter adds at a site: `a` [cols, ranks of all parts]."""

    a: torch.Tensor
    parts: tuple[_Part, ...]

    def to(self, device: torch.device) -> _Product:
        """Return it on a device; the same where it is there."""
        parts = (
            _Part(one.start, one.stop, one.first, one.last, one.b.to(device, non_blocking=True)) for one in self.parts
        )
        return _Product(self.a.to(device, non_blocking=True), tuple(parts))


_Adapter = dict[int, _Product]


class TorchAdapters(AdapterBackend[NoOptions]):
    """Keeps matrices in the type in which the network computes. `b` has the scale in it."""

    def __init__(self, options: NoOptions, ctx: AdapterContext) -> None:
        super().__init__(options, ctx)
        self._slots: list[_Adapter | None] = [None] * (ctx.slots + 1)

    @classmethod
    def supports(cls, options: NoOptions, ctx: AdapterContext) -> str | None:
        return f"the runner {ctx.computed_by!r} takes another backend's additions only" if ctx.computed_by else None

    @property
    def device_bytes(self) -> int:
        if self.ctx.device.type == "cpu":
            return 0  # a slot refers to what is on the host
        numbers = sum(site.cols * len(site.parts) + site.rows for site in self.ctx.sites)
        return numbers * self.ctx.max_rank * self.ctx.slots * self.ctx.dtype.itemsize

    def prepare(self, weights: AdapterWeights) -> _Adapter:
        return {number: _product(parts, self.ctx.dtype) for number, parts in weights.sites.items()}

    def activate(self, slot: int, prepared: object) -> None:
        assert isinstance(prepared, dict)
        device = self.ctx.device
        found: _Adapter = {number: product.to(device) for number, product in prepared.items()}
        self._slots[slot] = found

    def clear(self, slot: int) -> None:
        self._slots[slot] = None

    def begin(self, slots: NDArray[np.int64], lens: NDArray[np.int64], put: Put) -> TorchAdditions | None:
        tokens = slots.repeat(lens)
        found = []
        for slot in np.unique(tokens).tolist():
            if slot:
                adapter = self._slots[slot]
                assert adapter is not None, f"slot {slot} is empty"
                found.append((_rows(np.flatnonzero(tokens == slot), put), adapter))
        return TorchAdditions(found) if found else None


class TorchAdditions:
    """What the adapters of one batch add, each with the rows of its tokens."""

    def __init__(self, adapters: list[tuple[Rows, _Adapter]]) -> None:
        self._adapters = adapters

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        for rows, adapter in self._adapters:
            product = adapter.get(site)
            if product is None:
                continue
            if isinstance(rows, slice):
                small = x[rows] @ product.a
                for part in product.parts:
                    out[rows, part.start : part.stop].addmm_(small[:, part.first : part.last], part.b)
            else:
                small = x.index_select(0, rows) @ product.a
                for part in product.parts:
                    added = small[:, part.first : part.last] @ part.b
                    out[:, part.start : part.stop].index_add_(0, rows, added)


def _rows(places: NDArray[np.int64], put: Put) -> Rows:
    """Return rows as a slice where they are next to each other."""
    first, last = int(places[0]), int(places[-1]) + 1
    return slice(first, last) if last - first == len(places) else put(places)


def _product(parts: tuple[LowRank, ...], dtype: torch.dtype) -> _Product:
    made, first = [], 0
    for part in parts:
        last = first + len(part.a)
        b = (part.b.float() * part.scale).to(dtype).T.contiguous()
        made.append(_Part(part.start, part.start + len(part.b), first, last, b))
        first = last
    a = torch.cat([part.a.to(dtype) for part in parts]).T.contiguous()
    return _Product(a, tuple(made))
