"""Leases of a source, and figures, that several threads look at."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.protocol import lease_word

if TYPE_CHECKING:
    from collections.abc import Mapping


class Lease:
    """What a source allows, until it says otherwise."""

    def __init__(self) -> None:
        self.lasts = True


class Leases:
    """The leases that stand, by number as it travels.

    They need no lock: a source looks at one before each chunk that it gathers, and once more after the last one. A
    lease that still lasts then has lasted while all bytes were read. So `revoke` waits for nothing.
    """

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}

    def allow(self, lease: int) -> None:
        """Let peers read under this lease. One that stands stays the same: answers under way look at it."""
        self._leases.setdefault(lease_word(lease), Lease())

    def revoke(self, lease: int) -> None:
        """End a lease."""
        ended = self._leases.pop(lease_word(lease), None)
        if ended is not None:
            ended.lasts = False

    def get(self, word: int) -> Lease | None:
        """Return a lease that stands, by its number as it travels."""
        return self._leases.get(word)


class Counts:
    """Figures that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a figure."""
        with self._lock:
            self._counts[name] += count

    def all(self) -> Mapping[str, float]:
        """Return all of them."""
        with self._lock:
            return dict(self._counts)
