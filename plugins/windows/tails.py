"""Tails: the pages before a place in a prompt that window layers read from there on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.toolkit.cache.kept_prefixes import MOST, KeptPrefixes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What is kept of a prefix of `length` tokens, whole pages: for each group the pages int64 [n] that end there."""

    length: int
    pages: tuple[NDArray[np.int64], ...]


class Tails(KeptPrefixes[Tail]):
    """Those that are kept. `gone` is called with one that is let go of: for want of pages, or as there are too many."""

    def __init__(self, gone: Callable[[Tail], None]) -> None:
        super().__init__()
        self._gone = gone

    def add(self, req: Req, kept: Tail) -> bool:
        """Keep a tail of a request's tokens; False where there is one of these tokens already."""
        added = super().add(req, kept)
        if len(self) > MOST:
            self.evict_one()
        return added

    def evict_one(self) -> bool:
        """Let go of the one least recently used; False: there is none."""
        tail = self.evict()
        if tail is not None:
            self._gone(tail)
        return tail is not None
