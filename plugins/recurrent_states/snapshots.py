"""Snapshots: states of prefixes that requests may begin from, found by the tokens that they stand for."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.toolkit.cache.kept_prefixes import KeptPrefixes

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a prefix of `length` tokens."""

    slot: int
    length: int


class Snapshots(KeptPrefixes[Snapshot]):
    """Those that are kept. Each has a slot of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: set[int] = set()
        """Theirs."""

    def add(self, req: Req, kept: Snapshot) -> bool:
        """Keep a snapshot of a request's tokens; False where there is one of these tokens already."""
        added = super().add(req, kept)
        if added:
            self.slots.add(kept.slot)
        return added

    def evict_other(self, needed: AbstractSet[int]) -> int | None:
        """Let go of the one least recently used whose slot is not `needed`. Return its slot; None: there is none."""
        gone = self.evict(lambda kept: kept.slot not in needed)
        if gone is None:
            return None
        self.slots.discard(gone.slot)
        return gone.slot
