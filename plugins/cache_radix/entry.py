"""What the radix cache keeps at every node of its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.toolkit.cache.eviction import History
from pegboard.toolkit.cache.radix_tree import RadixNode

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Entry(History):
    """The pages int64 [pages] of a node's tokens, how many locks hold it, and what eviction goes by.

    A lock on a node holds the whole path to it, so a node has at least as many locks as its children together. `node`
    is None once the node is out of the tree.
    """

    __slots__ = ("locks", "node", "pages")

    def __init__(self, pages: NDArray[np.int64], tick: int, priority: int) -> None:
        super().__init__(tick, priority)
        self.pages = pages
        self.locks = 0
        self.node: Node | None = None

    def split(self, pages: int) -> Entry:
        """Return a new entry for the first `pages` pages, with the same locks and history; the rest stays here."""
        upper = Entry(self.pages[:pages].copy(), self.created, self.priority)
        upper.inherit(self)
        upper.locks = self.locks
        self.pages = self.pages[pages:].copy()
        return upper

    @property
    def evictable(self) -> bool:
        return not self.locks and self.node is not None and not self.node.children


Node = RadixNode[Entry]


def no_entry() -> Entry:
    """For the root of a namespace: it holds nothing."""
    return Entry(np.empty(0, dtype=np.int64), 0, 0)
