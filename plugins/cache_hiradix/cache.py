"""The radix cache with tiers: every cached prefix is a path in one tree, whose pages are on the device or the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from pegboard.plugins.cache_hiradix.checking import check_tree
from pegboard.plugins.cache_hiradix.counters import Counters
from pegboard.plugins.cache_hiradix.entry import NO_PAGES, Node
from pegboard.plugins.cache_hiradix.handle import TierHandle
from pegboard.plugins.cache_hiradix.loading import Loads
from pegboard.plugins.cache_hiradix.options import HiRadixOptions
from pegboard.plugins.cache_hiradix.prefetching import NothingMore
from pegboard.plugins.cache_hiradix.tree import TierTree
from pegboard.plugins.cache_hiradix.writing import Writing
from pegboard.plugins.kv_tiers.api import NAME, ORIGINS, PageLoad, tiers_of
from pegboard.toolkit.cache.describing import largest_runs
from pegboard.toolkit.cache.pages import merge_pages, pages_of, slots_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CachedRun, CacheHandle, PrefixCacheContext
    from pegboard.plugins.cache_hiradix.entry import Entry
    from pegboard.plugins.kv_tiers.api import Prefetch
    from pegboard.toolkit.cache.radix_tree import RadixPath


class HiRadixCache(PrefixCache[HiRadixOptions]):
    """Matches and inserts cost one vectorised comparison per node on the path; a victim costs O(log leaves).

    What goes where is decided here, in page numbers alone. Jobs are looked at in `poll`: nothing waits for one, but an
    eviction with write_back, for a moment.
    """

    origins = ORIGINS
    loader = NAME

    def __init__(self, options: HiRadixOptions, ctx: PrefixCacheContext) -> None:
        super().__init__(options, ctx)
        self.tiers = tiers = tiers_of(ctx)
        host_pages = 0 if tiers is None else tiers.mover.host_pages
        num_pages = self.allocator.num_pages
        self._tree = TierTree(
            self.page_size,
            num_pages,
            host_pages,
            options.eviction,
            copies_first=options.write_policy != "write_back",
            changed=self._changed,
        )
        if options.eviction == "slru":
            self._tree.protect(int(options.protected_share * (num_pages + host_pages) * self.page_size))
        self._owned = np.zeros(num_pages + 1, dtype=np.bool_)
        self._counters = Counters()
        self._loads = Loads(self._tree, self._counters)
        self._writing: Writing | None = None
        if tiers is not None and host_pages:
            self._writing = Writing(options, self._tree, tiers, self._counters)

    # ---- finding ---------------------------------------------------------------------------------------------------

    def matched_length(self, key: PrefixKey) -> int:
        path = self._tree.tokens.find(key.tokens, key.namespace)
        _, end = self._reach(path)
        # A node that is found in part is not split for a look, and its other part is as recent then.
        self._tree.touch([node for node in path.nodes if node.start < end])
        return end

    def match(self, key: PrefixKey) -> PrefixMatch:
        tree = self._tree
        path = tree.tokens.find(key.tokens, key.namespace)
        device, end = self._reach(path)
        nodes, tail = tree.cut(path.nodes, device, end)
        tree.touch(nodes + tail)
        if nodes and self._writing is not None:
            self._writing.used(nodes[-1], key.memo)
        handle = TierHandle(nodes[-1] if nodes else None, device, tail[-1] if tail else None, end, len(key))
        slots, host = slots_of(_device_pages(nodes), self.page_size), _host_pages(tail)
        if not host.size:
            return PrefixMatch(slots, handle)
        stored = int(np.count_nonzero(tree.host.brought[host])) * self.page_size
        origins = {"host": end - device - stored, "storage": stored}
        return PrefixMatch(slots, handle, end - device, origins, bool(tree.host.loads[host[0]]))

    def lock(self, handle: CacheHandle) -> None:
        held = _checked(handle)
        if not held.valid:
            raise ValueError("cannot lock a prefix that has been evicted since it was matched: match it again")
        self._tree.lock(held.node, 1)
        self._tree.lock_tail(held.tail_nodes(), 1)
        held.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        held = _checked(handle)
        if not held.locks:
            raise ValueError("this handle is not locked")
        held.locks -= 1
        self._tree.lock(held.node, -1)
        self._tree.lock_tail(held.tail_nodes(), -1)

    # ---- keeping ---------------------------------------------------------------------------------------------------

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if slots.shape != (len(key),):
            raise ValueError(f"{len(key)} tokens, but slots {list(slots.shape)}")
        return self._insert(None, key, slots, priority)

    def extend(
        self, handle: CacheHandle, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0
    ) -> InsertResult:
        held = _checked(handle)
        if not held.locks:
            raise ValueError("a path that is not locked cannot be extended")
        if slots.shape != (len(key) - held.length,):
            raise ValueError(f"{len(key)} tokens, but a path of {held.length} and slots {list(slots.shape)}")
        if not held.counted:
            held.counted = True
            self._counters.hit_device += held.length
            self._counters.missed += held.wanted - held.end
        return self._insert(held.node, key, slots, priority)

    def _insert(self, after: Node | None, key: PrefixKey, slots: NDArray[np.int64], priority: int) -> InsertResult:
        """Insert what follows the path to `after` (None for the empty one); `slots` are those of the rest."""
        tree, start = self._tree, 0 if after is None else after.end
        canonical = np.array(slots, dtype=np.int64)
        taken = tree.tokens.aligned(len(key)) - start
        given = pages_of(canonical[:taken], self.page_size)
        path = tree.tokens.find(key.tokens, key.namespace, after)
        tree.end_node(path)
        rest = path.nodes if after is None else path.nodes[1:]
        cached = _device_pages(rest)
        merge_pages(self.allocator, self._owned, cached, given, canonical)
        fresh = given[cached.size :]
        tree.tick += 1
        self._owned[fresh] = True
        fresh = fresh[self._revive(rest, fresh) :]
        tree.used(path.node, priority)
        if fresh.size:
            tree.add_device(tree.add_leaf(path, key, priority), fresh)
        end = path.node
        if end is not None and self._writing is not None:
            self._writing.used(end, key.memo)
        return InsertResult(canonical, taken, TierHandle(end, path.length))

    def _revive(self, nodes: list[Node], given: NDArray[np.int64]) -> int:
        """Give nodes that only the host has their device pages back; how many."""
        at = 0
        for node in nodes:
            entry = node.data
            missing = entry.host.size - entry.device.size
            if missing > 0:
                self._tree.add_device(node, given[at : at + missing])
                at += missing
        return at

    def evict(self, num_tokens: int) -> int:
        freed: list[NDArray[np.int64]] = []
        count = 0
        while count < num_tokens and (entry := self._tree.victims.pop()) is not None:
            if entry.node is None:
                raise AssertionError("a candidate for eviction is not in the tree")
            pages = min(entry.device.size, -(-(num_tokens - count) // self.page_size))
            keep = entry.device.size - pages
            if self._writing is not None:
                self._writing.evicting(entry.node, keep)
            freed.append(self._tree.cut_device(entry.node, keep))
            count += pages * self.page_size
        self._give_back(freed)
        return count

    @property
    def evictable_tokens(self) -> int:
        return (self._tree.device_pages - self._tree.locked_pages) * self.page_size

    @property
    def locked_tokens(self) -> int:
        return self._tree.locked_pages * self.page_size

    def reset(self) -> None:
        if self._tree.locked_pages or self._tree.tails_locked:
            raise RuntimeError(f"cannot reset: {self.locked_tokens} cached tokens are locked")
        if self._writing is not None:
            self._writing.stop()
        self._give_back([self._tree.clear()])

    # ---- tiers -----------------------------------------------------------------------------------------------------

    def load(self, handle: CacheHandle, slots: NDArray[np.int64]) -> PageLoad:
        held = _checked(handle)
        if not held.locks:
            raise ValueError("what is behind a path that is not locked cannot be loaded")
        if slots.shape != (held.end - held.length,):
            raise ValueError(f"{held.end - held.length} tokens are on the host, but slots {list(slots.shape)}")
        device = pages_of(np.array(slots, dtype=np.int64), self.page_size)
        if device.size and (device.min() < 1 or device.max() > self.allocator.num_pages or self._owned[device].any()):
            raise ValueError("what is loaded goes into pages of the caller's own")
        load = self._loads.begin(device, _host_pages(held.tail_nodes()[::-1]))
        self._changed()
        return load

    def loaded(self, load: object, ok: bool) -> None:
        if not isinstance(load, PageLoad):
            raise ValueError(f"{load!r} is not a load of this cache")
        self._loads.end(load, ok)
        self._changed()

    def prefetch(self, key: PrefixKey) -> Prefetch:
        """Begin to bring what storages have of `key` to the host."""
        if self._writing is not None:
            return self._writing.prefetcher.begin(key)
        return NothingMore(self.matched_length(key))

    def poll(self) -> None:
        if self._writing is not None:
            self._writing.poll()

    @property
    def busy(self) -> bool:
        return self._writing is not None and self._writing.busy

    def stats(self) -> Mapping[str, float]:
        host, size = self._tree.host, self.page_size
        return {
            **self._counters.as_totals(),
            "host_evicted_tokens_total": float(self._tree.host_evicted * size),
            "host_tokens": float((host.num_pages - host.free) * size),
            "host_free_tokens": float(host.free * size),
            "quarantined_tokens": float(host.lost * size),
            "clean_tokens": float(self._tree.clean_pages * size),
            **({} if self.tiers is None else self.tiers.stats()),
        }

    def prepare(self, seconds: float) -> tuple[int, int]:
        return (0, 0) if self.tiers is None else self.tiers.prepare(seconds)

    def describe(self, most: int) -> list[CachedRun]:
        return largest_runs(self._tree.tokens, most, lambda entry: (entry.device.size, entry.locks > 0))

    def close(self) -> None:
        if self._writing is not None:
            self._writing.close()
        if self.tiers is not None:
            self.tiers.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        check_tree(self._tree)
        self._loads.check()
        if self._writing is not None:
            self._writing.prefetcher.check()
        every = np.sort(_device_pages(list(self._tree.tokens.nodes())))
        assert np.array_equal(every, np.flatnonzero(self._owned)), "the pages of the tree are not those that are owned"

    def _changed(self) -> None:
        self.version += 1

    def _reach(self, path: RadixPath[Entry]) -> tuple[int, int]:
        """How far a path is on the device, and how far with what is worth to be loaded from the host behind that."""
        device, end = self._tree.extent(path)
        return device, end if end - device >= self.options.load_threshold else device

    def _give_back(self, freed: list[NDArray[np.int64]]) -> None:
        if freed:
            pages = np.concatenate(freed)
            self._owned[pages] = False
            self.allocator.free(pages)


def _checked(handle: CacheHandle) -> TierHandle:
    if not isinstance(handle, TierHandle):
        raise TypeError(f"this is not a handle of a hiradix cache: {handle!r}")
    return handle


def _device_pages(nodes: list[Node]) -> NDArray[np.int64]:
    return np.concatenate([node.data.device for node in nodes]) if nodes else NO_PAGES


def _host_pages(nodes: list[Node]) -> NDArray[np.int64]:
    return np.concatenate([node.data.host for node in nodes]) if nodes else NO_PAGES
