"""A doubly linked list threaded through flat arrays, as an order of recency."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LinkedOrder:
    """Pages 1..num_pages in order of use, most recent first. Page 0 is the list's both ends.

    Moving one page costs O(1). Pages that were moved together stay neighbours, so a whole run of them is taken out by
    two links; what a call costs beyond that is vectorised.
    """

    def __init__(self, num_pages: int) -> None:
        self.after = np.zeros(num_pages + 1, dtype=np.int64)
        self.before = np.zeros(num_pages + 1, dtype=np.int64)
        # Item access through a memoryview takes a third of numpy's.
        self._after = self.after.data
        self._before = self.before.data

    def push(self, pages: NDArray[np.int64]) -> None:
        """Put `pages` (none of them in the list) at the recent end, the first one being the most recent."""
        if not pages.shape[0]:
            return
        first, last, old = int(pages[0]), int(pages[-1]), self._after[0]
        self.after[pages[:-1]] = pages[1:]
        self.before[pages[1:]] = pages[:-1]
        self._before[first], self._after[last] = 0, old
        self._after[0], self._before[old] = first, last

    def remove(self, pages: NDArray[np.int64]) -> None:
        """Take `pages` (all of them in the list) out, run by run."""
        if not pages.shape[0]:
            return
        ends = np.flatnonzero(self.after[pages[:-1]] != pages[1:])
        firsts = pages[np.concatenate(([0], ends + 1))].tolist()
        lasts = pages[np.concatenate((ends, [pages.shape[0] - 1]))].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            before, after = self._before[first], self._after[last]
            self._after[before], self._before[after] = after, before

    def pop(self, count: int) -> NDArray[np.int64]:
        """Take out the `count` least recent pages (fewer if there are fewer), the least recent one first."""
        pages: list[int] = []
        page = self._before[0]
        while page and len(pages) < count:
            pages.append(page)
            page = self._before[page]
        self._before[0], self._after[page] = page, 0
        return np.array(pages, dtype=np.int64)

    def pages(self) -> list[int]:
        """Return all pages, most recent first. O(n), for checks; raises AssertionError where the links do not agree."""
        pages: list[int] = []
        page = 0
        while (after := self._after[page]) != 0:
            assert self._before[after] == page, f"page {after} follows {page}, but says {self._before[after]}"
            assert len(pages) < len(self._after), "the list runs in a circle"
            pages.append(after)
            page = after
        assert self._before[0] == page, f"the list ends with page {page}, but says {self._before[0]}"
        return pages
