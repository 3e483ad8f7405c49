"""Page allocators on numpy: every call is vectorised and costs O(pages in the call), whatever the pool's size."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.token_allocator import TokenAllocator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.token_allocator import TokenAllocatorContext


class PageAllocator(TokenAllocator[NoOptions]):
    """What both allocators share: the checks, and the bitmap of free pages that finds a double free.

    A subclass keeps the free pages in an order of its own (`_take`, `_put`, `_refill`) and holds each exactly once.
    """

    def __init__(self, options: NoOptions, ctx: TokenAllocatorContext) -> None:
        super().__init__(options, ctx)
        self._is_free = np.empty(ctx.num_pages + 1, dtype=np.bool_)
        self._position = np.zeros(ctx.num_pages + 1, dtype=np.int64)  # scratch of _check, never read across calls
        self._num_free = 0
        self.reset()

    @property
    def free_pages(self) -> int:
        return self._num_free

    def alloc(self, n: int) -> NDArray[np.int64] | None:
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self._num_free:
            return None
        pages = self._take(n)
        self._num_free -= n
        self._is_free[pages] = False
        return pages

    def free(self, pages: NDArray[np.int64]) -> None:
        pages = self._check(pages)
        self._put(pages)
        self._num_free += pages.shape[0]
        self._is_free[pages] = True

    def reset(self) -> None:
        self._is_free[:] = True
        self._is_free[0] = False
        self._num_free = self.num_pages
        self._refill()

    def _check(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        pages = np.asarray(pages)
        if pages.ndim != 1 or (pages.dtype.kind not in "iu" and pages.size):
            raise ValueError(f"pages must be a flat array of integers, not {pages.dtype} {list(pages.shape)}")
        pages = pages.astype(np.int64, copy=False)
        if not pages.size:
            return pages
        if pages.min() < 1 or pages.max() > self.num_pages:
            bad = pages[(pages < 1) | (pages > self.num_pages)]
            raise ValueError(f"cannot free page {bad[0]}: pages run from 1 to {self.num_pages}")
        if self._is_free[pages].any():
            raise ValueError(f"page {pages[self._is_free[pages]][0]} is free already")
        # Of a page given twice, the second writing wins, so the first one no longer finds its own position.
        order = np.arange(pages.shape[0])
        self._position[pages] = order
        twice = self._position[pages] != order
        if twice.any():
            raise ValueError(f"page {pages[twice][0]} is given twice")
        return pages

    @abstractmethod
    def _take(self, n: int) -> NDArray[np.int64]:
        """Remove and return the next `n` free pages (there are as many), as a new array."""

    @abstractmethod
    def _put(self, pages: NDArray[np.int64]) -> None:
        """Add checked pages. `_num_free` still has its old value."""

    @abstractmethod
    def _refill(self) -> None:
        """All pages are free, in ascending order."""


class StackAllocator(PageAllocator):
    """Last freed, first handed out: recently used pages are used again while the device's caches still hold them.

    Pages that are freed together are handed out in the same order, so that neighbours stay neighbours.
    """

    def _refill(self) -> None:
        self._stack = np.arange(self.num_pages, 0, -1, dtype=np.int64)

    def _take(self, n: int) -> NDArray[np.int64]:
        top = self._num_free
        return self._stack[top - n : top][::-1].copy()

    def _put(self, pages: NDArray[np.int64]) -> None:
        top = self._num_free
        self._stack[top : top + pages.shape[0]] = pages[::-1]


class FifoAllocator(PageAllocator):
    """First freed, first handed out, so that a page rests as long as possible before its content is overwritten."""

    def _refill(self) -> None:
        self._ring = np.arange(1, self.num_pages + 1, dtype=np.int64)
        self._head = 0

    def _take(self, n: int) -> NDArray[np.int64]:
        where = self._places(self._head, n)
        self._head = (self._head + n) % max(1, self.num_pages)
        return self._ring[where]

    def _put(self, pages: NDArray[np.int64]) -> None:
        self._ring[self._places(self._head + self._num_free, pages.shape[0])] = pages

    def _places(self, start: int, n: int) -> NDArray[np.int64]:
        return (start + np.arange(n, dtype=np.int64)) % max(1, self.num_pages)
