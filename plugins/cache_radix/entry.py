"""What the radix cache keeps at every node of its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.toolkit.cache.radix_tree import RadixNode

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Entry:
    """The pages int64 [pages] of a node's tokens, how many locks hold it, and what eviction goes by.

    A lock on a node holds the whole path to it, so a node has at least as many locks as its children together. Times
    are ticks of the cache's own clock.
    """

    __slots__ = ("created", "hits", "last_access", "locks", "pages", "place", "priority", "protected")

    def __init__(self, pages: NDArray[np.int64], tick: int, priority: int) -> None:
        self.pages = pages
        self.locks = 0
        self.created = tick
        self.last_access = tick
        self.hits = 0
        self.priority = priority
        self.protected = False
        self.place = -1
        """Where the node stands in the heap of victims; -1 where it does not."""

    def split(self, pages: int) -> Entry:
        """Return a new entry for the first `pages` pages, with the same locks and history; the rest stays here."""
        upper = Entry(self.pages[:pages].copy(), self.created, self.priority)
        upper.locks, upper.last_access = self.locks, self.last_access
        upper.hits, upper.protected = self.hits, self.protected
        self.pages = self.pages[pages:].copy()
        return upper


Node = RadixNode[Entry]


def no_entry() -> Entry:
    """For the root of a namespace: it holds nothing."""
    return Entry(np.empty(0, dtype=np.int64), 0, 0)
