"""Which heads come from which rank, where the two servers have other tensor-parallel sizes. No I/O here.

Heads of a region are dealt out to ranks as model parallelism does it: in blocks of equal length, by rank. Where there
are more ranks than heads, each head is on as many neighbouring ranks, and one of them gives it: the one that is as far
among them as the reader is among those that have the head on its own side. So equal sizes read rank by rank, and the
work is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

MAX_RANKS = 64
"""Ranks of a server at most."""


class Heads(NamedTuple):
    """Heads [first, stop)."""

    first: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.first

    def after(self, first: int) -> Heads:
        """Return them counted from `first` on; where there are none, none at 0."""
        return Heads(self.first - first, self.stop - first) if self.width else Heads(0, 0)

    def among(self, other: Heads) -> Heads:
        """Return those that both have; empty where there are none."""
        first = max(self.first, other.first)
        return Heads(first, max(first, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank's part of the KV of its server. By region of the pool: `heads` of all ranks together, and the bytes of
    each of them in a slot.
    """

    heads: tuple[int, ...]
    head_bytes: tuple[int, ...]
    rank: int = 0
    size: int = 1

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of a slot of this rank, by region."""
        return self.slot_bytes_of(self.size)

    def slot_bytes_of(self, size: int) -> tuple[int, ...]:
        """Return the bytes of a slot of a rank where there are so many."""
        pairs = zip(self.heads, self.head_bytes, strict=True)
        return tuple(held(heads, 0, size).width * nbytes for heads, nbytes in pairs)


@dataclass(frozen=True, slots=True)
class Share:
    """What the rank `rank` there gives to this one. By region: `there` are heads among those that it has, `here` the
    same ones among those of this rank. Both are empty where it gives none of a region.
    """

    rank: int
    there: tuple[Heads, ...]
    here: tuple[Heads, ...]


Plan: TypeAlias = Callable[[Layout, int], Sequence[Share]]
"""Returns the shares of a layout's heads, from a server with so many ranks. Each head is in one of them."""


def objection(heads: Sequence[int], size: int) -> str:
    """Return why so many ranks cannot have these heads, "" where they can."""
    if not 1 <= size <= MAX_RANKS:
        return f"there are from 1 to {MAX_RANKS} ranks, not {size}"
    for count in heads:
        if count % size and size % count:
            return f"{count} heads cannot be dealt out to {size} ranks: one number must be a multiple of the other"
    return ""


def held(heads: int, rank: int, size: int) -> Heads:
    """Return the heads that a rank has. Raises ValueError where they cannot be dealt out."""
    if wrong := objection([heads], size):
        raise ValueError(wrong)
    if heads >= size:
        each = heads // size
        return Heads(rank * each, (rank + 1) * each)
    head = rank // (size // heads)
    return Heads(head, head + 1)


def shares(layout: Layout, size: int) -> tuple[Share, ...]:
    """Return what is read from which of `size` ranks, in their order: a Plan. Raises ValueError where heads cannot be
    dealt out to so many.
    """
    own = [held(heads, layout.rank, layout.size) for heads in layout.heads]
    found = []
    for rank in range(size):
        given = [_given(heads, layout, rank, size) for heads in layout.heads]
        if any(one.width for one in given):
            there = (one.after(held(heads, rank, size).first) for one, heads in zip(given, layout.heads, strict=True))
            here = (one.after(mine.first) for one, mine in zip(given, own, strict=True))
            found.append(Share(rank, tuple(there), tuple(here)))
    return tuple(found)


def _given(heads: int, layout: Layout, rank: int, size: int) -> Heads:
    """Return those heads of a region that `rank` of `size` gives to the layout's rank."""
    copies, own_copies = max(1, size // heads), max(1, layout.size // heads)
    chosen = layout.rank % own_copies * copies // own_copies
    has, wants = held(heads, rank, size), held(heads, layout.rank, layout.size)
    found = has.among(wants)
    return found if rank % copies == chosen and found.width else Heads(0, 0)
