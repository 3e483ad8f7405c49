"""Writing blocks to storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.plugins.cache_hiradix.entry import NO_PAGES
from pegboard.toolkit.cache.radix_tree import RadixRoot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixMemo
    from pegboard.plugins.cache_hiradix.counters import Counters
    from pegboard.plugins.cache_hiradix.entry import Node
    from pegboard.plugins.cache_hiradix.jobs import Leftovers
    from pegboard.plugins.cache_hiradix.options import HiRadixOptions
    from pegboard.plugins.cache_hiradix.tree import TierTree
    from pegboard.plugins.kv_tiers.api import Job, PageMover
    from pegboard.toolkit.cache.block_keys import BlockKeys

GROUP = 16
"""Blocks of one job."""


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Blocks on their way to a storage, which has a bit: host pages int64 [blocks, block_pages]."""

    job: Job
    bit: np.uint64
    host: NDArray[np.int64]


class Storer:
    """Writes the whole blocks of paths, from the root on, once they are ready on the host and have been used enough.

    Host pages are pinned meanwhile, so there is a bound on how many may wait; blocks beyond it are offered again when
    their path is used.
    """

    def __init__(
        self,
        tree: TierTree,
        mover: PageMover,
        keys: BlockKeys,
        options: HiRadixOptions,
        counters: Counters,
        leftovers: Leftovers,
    ) -> None:
        self._tree = tree
        self._mover = mover
        self._keys = keys
        self._room = int(options.store_share * mover.host_pages)
        self._group = max(1, min(GROUP, self._room // mover.block_pages))
        self._hits = options.hits_to_store
        self._counters = counters
        self._leftovers = leftovers
        self._stores: list[Store] = []

    def __len__(self) -> int:
        return len(self._stores)

    def offer(self, node: Node, memo: PrefixMemo | None) -> None:
        """Write those blocks of the path to a node that a storage lacks, as far as there is room."""
        if not any(one.data.unstored for one in node.ancestry()):
            return
        path, pages = self._ready(node)
        blocks = pages.size // self._mover.block_pages
        table = pages[: blocks * self._mover.block_pages].reshape(blocks, self._mover.block_pages)
        keys: list[bytes] = []
        complete = True
        for store in range(len(self._mover.stores)):
            bit = np.uint64(1 << store)
            missing = np.flatnonzero(((self._tree.host.stored[table] & bit) == 0).any(axis=1))
            if missing.size and not keys:
                keys = self._keys.of(_key_of(path, blocks * self._keys.block, memo), blocks)
            for start in range(0, missing.size, self._group):
                rows = missing[start : start + self._group]
                complete = self._begin(store, bit, [keys[row] for row in rows.tolist()], table[rows]) and complete
        for one in path:
            one.data.unstored = not complete

    def poll(self) -> None:
        """Take the results of writes that have ended."""
        if not any(store.job.done for store in self._stores):
            return
        ended = [store for store in self._stores if store.job.done]
        self._stores = [store for store in self._stores if not store.job.done]
        for store in ended:
            self._finish(store)

    def cancel(self) -> None:
        """Let go of all writes under way."""
        for store in self._stores:
            self._leftovers.leave(store.job, store.host.reshape(-1))
            self._room += store.host.size
        self._stores.clear()

    def _begin(self, store: int, bit: np.uint64, keys: list[bytes], host: NDArray[np.int64]) -> bool:
        if host.size > self._room:
            self._counters.store_skipped += host.size * self._tree.page_size
            return False
        self._room -= host.size
        self._tree.pin(host.reshape(-1))
        self._tree.host.stored[host] |= bit
        self._stores.append(Store(self._mover.store(store, keys, host), bit, host))
        return True

    def _finish(self, store: Store) -> None:
        book = self._tree.host
        self._room += store.host.size
        lost = store.host[store.job.result :].reshape(-1)
        book.stored[lost] &= ~store.bit
        owners = book.owner[lost]
        for ident in np.unique(owners[owners >= 0]).tolist():
            self._tree.entries[ident].unstored = True
        self._tree.unpin(store.host.reshape(-1))
        self._counters.stored += (store.host.size - lost.size) * self._tree.page_size
        self._counters.store_failed += lost.size * self._tree.page_size

    def _ready(self, node: Node) -> tuple[list[Node], NDArray[np.int64]]:
        """Return the part of a path that may be written, and its host pages."""
        path: list[Node] = []
        pages = [NO_PAGES]
        for one in list(node.ancestry())[::-1]:
            if one.data.hits + 1 < self._hits:
                break
            ready = self._tree.ready(one.data)
            path.append(one)
            pages.append(one.data.host[:ready])
            if ready * self._tree.page_size < len(one):
                break
        return path, np.concatenate(pages)


def _key_of(path: list[Node], length: int, memo: PrefixMemo | None) -> PrefixKey:
    """Return the key of a path's first `length` tokens."""
    root = path[0].parent
    if not isinstance(root, RadixRoot):
        raise AssertionError("a path does not begin at a root")
    return PrefixKey(np.concatenate([node.tokens for node in path])[:length], root.namespace, memo)
