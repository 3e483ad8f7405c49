"""The books of the host's pages: flat arrays by page, so that a node can be split while its pages are on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FREE, FILLING, READY, FETCHING, LOST = range(5)
"""What a host page is: free; in the tree, being copied from the device; in the tree with what it should have; being
read from a storage, in no tree; or given back while something still reads or writes it, and out of use until that ends.
"""
NO_OWNER = -1


class HostBook:
    """All host pages, 1 to `num_pages`.

    `state` says what a page is. `pins` counts the jobs and loads that read or write it, `loads` the loads among them.
    `owner` is the ident of the tree's entry that has it. `stored` has a bit for each storage that has its block, or is
    about to; `brought` marks pages that came from a storage and have not been loaded since.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.state = np.full(num_pages + 1, FREE, dtype=np.uint8)
        self.pins = np.zeros(num_pages + 1, dtype=np.int32)
        self.loads = np.zeros(num_pages + 1, dtype=np.int32)
        self.owner = np.full(num_pages + 1, NO_OWNER, dtype=np.int64)
        self.stored = np.zeros(num_pages + 1, dtype=np.uint64)
        self.brought = np.zeros(num_pages + 1, dtype=np.bool_)
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int64)  # free pages, the next one last
        self.free = num_pages
        self.lost = 0

    def take(self, count: int, state: int) -> NDArray[np.int64]:
        """Return `count` free pages int64 [count], pinned once, which are `state` from now on."""
        self.free -= count
        pages = self._stack[self.free : self.free + count][::-1].copy()
        self.state[pages] = state
        self.pins[pages] = 1
        return pages

    def give(self, pages: NDArray[np.int64]) -> None:
        """Take pages back that are in use no more, but for those that pin them: those are free once they do not."""
        self.owner[pages] = NO_OWNER
        self.stored[pages] = 0
        self.brought[pages] = False
        pinned = self.pins[pages] > 0
        lost = pages[pinned]
        self.state[lost] = LOST
        self.lost += lost.size
        self._put_back(pages[~pinned])

    def pin(self, pages: NDArray[np.int64]) -> None:
        self.pins[pages] += 1

    def unpin(self, pages: NDArray[np.int64]) -> None:
        self.pins[pages] -= 1
        over = pages[(self.state[pages] == LOST) & (self.pins[pages] == 0)]
        self.lost -= over.size
        self._put_back(over)

    def check(self) -> None:
        """Verify the books; raises AssertionError."""
        free = np.flatnonzero(self.state[1:] == FREE) + 1
        assert np.array_equal(np.sort(self._stack[: self.free]), free), "the free host pages are not those on the stack"
        assert not self.pins[free].any(), "a free host page is pinned"
        lost = np.flatnonzero(self.state == LOST)
        assert lost.size == self.lost, f"{lost.size} host pages are quarantined, but {self.lost} counted"
        assert (self.pins[lost] > 0).all(), "a host page is quarantined, but nothing uses it"
        writing = np.flatnonzero((self.state == FILLING) | (self.state == FETCHING))
        assert (self.pins[writing] > 0).all(), "a host page is written to by no job"
        assert (self.loads >= 0).all(), "a host page is loaded less than not at all"
        assert (self.pins >= self.loads).all(), "a host page is loaded, but not pinned"

    def _put_back(self, pages: NDArray[np.int64]) -> None:
        self.state[pages] = FREE
        self._stack[self.free : self.free + pages.size] = pages[::-1]
        self.free += pages.size
