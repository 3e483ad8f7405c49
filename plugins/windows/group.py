"""The pages of one group: those of the layers that have the same window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.toolkit.cache.windows import most_pages, reach

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.windows.messages import Memory


class GroupPages:
    """Pages 1 to `count`. A page is free, or held by requests and by tails, of which several may hold it.

    A request is known by its row. It holds pages `first[row]` to `stop[row]` of its tokens, and `table` int32
    [rows, width] has their slots; other entries are out of date. It may need up to `bound[row]` of them in decodes.
    """

    def __init__(self, window: int, count: int, memory: Memory, page_size: int) -> None:
        self.window = window
        self.count = count
        self.reach = reach(window, page_size)
        self.most = most_pages(window, page_size)
        self.table = np.zeros((memory.rows, memory.width), np.int32)
        self.first, self.stop, self.bound = (np.zeros(memory.rows, np.int64) for _ in range(3))
        self.held = 0
        """Pages that requests hold."""
        self._page = page_size
        self._by_requests, self._by_tails = (np.zeros(count + 1, np.int64) for _ in range(2))
        self.free = list(range(count, 0, -1))
        """Pages that no request and no tail holds."""

    @property
    def available(self) -> int:
        """Pages that no request holds: they are free, or would be without tails."""
        return self.count - self.held

    def first_read(self, length: int) -> int:
        """Return the first page that is needed behind `length` tokens, or behind the last page boundary before it."""
        return max(0, length // self._page - self.reach)

    def bound_of(self, limit: int) -> int:
        """Return how many pages a request of at most `limit` tokens may need in decodes."""
        return min(self.most, -(-limit // self._page))

    def spoken_for(self) -> int:
        """Return the pages that requests have or may need, shared ones counted for each: they part with those."""
        return int(np.maximum(self.bound, self.stop - self.first).sum())

    def pages(self, row: int, first: int, stop: int) -> NDArray[np.int64]:
        """Return pages [first, stop) of a request's tokens."""
        size = self._page
        found = self.table[row, first * size : stop * size : size].astype(np.int64)
        found //= size
        return found

    def places(self, row: int, first: int, stop: int) -> NDArray[np.int64]:
        """Return the places of the table that have pages [first, stop) of a request's tokens."""
        return row * self.table.shape[1] + np.arange(first * self._page, stop * self._page)

    def seat(self, row: int, start: int, tail: NDArray[np.int64], bound: int) -> None:
        """Let a request begin behind `start` tokens, whose last pages are `tail`."""
        self.first[row], self.stop[row], self.bound[row] = start // self._page - len(tail), start // self._page, bound
        self._hold(tail)
        self._write(row, int(self.first[row]), tail)

    def missing(self, rows: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many pages each request lacks for its first `stops` tokens."""
        lacking: NDArray[np.int64] = -(-stops // self._page) - self.stop[rows]
        return np.maximum(0, lacking)

    def extend(self, row: int, pages: int) -> None:
        """Give a request so many of the free pages."""
        new = np.array([self.free.pop() for _ in range(pages)], np.int64)
        self._hold(new)
        self._write(row, int(self.stop[row]), new)
        self.stop[row] += pages

    def passed(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which requests hold pages that are not read any more, with so many tokens computed."""
        return lengths // self._page - self.reach > self.first[rows]

    def settle(self, row: int, length: int) -> None:
        """Take back what a request with `length` computed tokens does not read any more."""
        first = min(self.first_read(length), int(self.stop[row]))
        if first > self.first[row]:
            self._let_go(self._by_requests, self.pages(row, int(self.first[row]), first))
            self.first[row] = first

    def release(self, row: int) -> None:
        """Take back all that a request has."""
        self._let_go(self._by_requests, self.pages(row, int(self.first[row]), int(self.stop[row])))
        self.first[row] = self.stop[row] = self.bound[row] = 0

    def tail(self, row: int, length: int) -> NDArray[np.int64]:
        """Return the pages of a request that are read behind its first `length` tokens, whole pages."""
        return self.pages(row, self.first_read(length), length // self._page)

    def keep(self, pages: NDArray[np.int64]) -> None:
        """Have a tail hold pages as well."""
        self._by_tails[pages] += 1

    def drop(self, pages: NDArray[np.int64]) -> None:
        """Have a tail hold pages no more."""
        self._let_go(self._by_tails, pages)

    def books_error(self) -> str | None:
        """Return how the books do not balance, or None."""
        held = self._by_requests[1:] > 0
        others = int((~held & (self._by_tails[1:] > 0)).sum())
        if self.held != int(held.sum()) or len(self.free) + self.held + others != self.count:
            kept = f"{len(self.free)} are free, requests hold {self.held}, and tails alone {others}"
            return f"window {self.window}: of {self.count} pages {kept}"
        return None

    def _write(self, row: int, first: int, pages: NDArray[np.int64]) -> None:
        size = self._page
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        self.table[row, first * size : first * size + len(slots)] = slots

    def _hold(self, pages: NDArray[np.int64]) -> None:
        self.held += int((self._by_requests[pages] == 0).sum())
        self._by_requests[pages] += 1

    def _let_go(self, holders: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        holders[pages] -= 1
        gone = pages[holders[pages] == 0]
        if holders is self._by_requests:
            self.held -= len(gone)
        self.free += gone[(self._by_requests[gone] == 0) & (self._by_tails[gone] == 0)][::-1].tolist()
