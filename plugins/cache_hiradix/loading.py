"""Loads: host pages that are being copied to device pages of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.kv_tiers.api import PageLoad

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.cache_hiradix.counters import Counters
    from pegboard.plugins.cache_hiradix.tree import TierTree


class Loads:
    """Keeps the host pages of loads as they are, from their beginning to their end."""

    def __init__(self, tree: TierTree, counters: Counters) -> None:
        self._tree = tree
        self._counters = counters
        self._tickets = 0
        self._going: dict[int, PageLoad] = {}

    def begin(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> PageLoad:
        self._tickets += 1
        self._going[self._tickets] = PageLoad(self._tickets, device, host)
        self._tree.pin(host)
        self._tree.host.loads[host] += 1
        return PageLoad(self._tickets, device.copy(), host.copy())

    def end(self, load: PageLoad, ok: bool) -> None:
        """Let go of a load. Raises ValueError for one that is not under way."""
        known = self._going.pop(load.ticket, None)
        if known is None:
            raise ValueError("this load is not under way, or was told to be through before")
        host, size, book = known.host, self._tree.page_size, self._tree.host
        tokens = host.size * size
        book.loads[host] -= 1
        if ok:
            brought = int(np.count_nonzero(book.brought[host])) * size
            self._counters.hit_storage += brought
            self._counters.hit_host += tokens - brought
            book.brought[host] = False
        else:
            self._counters.loads_failed += tokens
        self._tree.unpin(host)

    def check(self) -> None:
        loads = np.zeros_like(self._tree.host.loads)
        for load in self._going.values():
            loads[load.host] += 1
        assert np.array_equal(loads, self._tree.host.loads), "pages are marked as being loaded that are not"
