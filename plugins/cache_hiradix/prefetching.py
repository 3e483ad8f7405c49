"""Bringing blocks from storages to the host before they are wanted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.plugins.cache_hiradix.host_book import FETCHING, READY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.cache_hiradix.counters import Counters
    from pegboard.plugins.cache_hiradix.entry import Entry, Node
    from pegboard.plugins.cache_hiradix.jobs import Leftovers
    from pegboard.plugins.cache_hiradix.options import HiRadixOptions
    from pegboard.plugins.cache_hiradix.saving import Saver
    from pegboard.plugins.cache_hiradix.tree import TierTree
    from pegboard.plugins.kv_tiers.api import Job, PageMover
    from pegboard.toolkit.cache.block_keys import BlockKeys
    from pegboard.toolkit.cache.radix_tree import RadixPath

GROUP = 16
"""Blocks that arrive together."""

AHEAD = 2
"""Groups of one prefetch that are under way."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Blocks from `start` on, on their way into host pages int64 [blocks, block_pages]."""

    job: Job
    start: int
    host: NDArray[np.int64]


class Fetch:
    """What one caller wants: a Prefetch.

    `first` is the first block that is not here. While another fetch brings it, this one waits (`finding` is None and
    there are no groups); then it asks for the rest itself. Blocks [`next`, `stop`) are known to be there, and are still
    to be asked for.
    """

    __slots__ = ("_all", "done", "finding", "first", "groups", "key", "keys", "next", "stop", "tokens", "wanted")

    def __init__(self, fetches: Prefetcher, key: PrefixKey, keys: list[bytes], tokens: int) -> None:
        self._all = fetches
        self.key = key
        self.keys = keys
        self.tokens = tokens
        self.wanted: int | None = None
        self.done = False
        self.first = self.next = self.stop = 0
        self.finding: Job | None = None
        self.groups: deque[Group] = deque()

    @property
    def waits(self) -> bool:
        return self.finding is None and not self.groups

    def close(self) -> None:
        self._all.close(self)


@dataclass(frozen=True, slots=True)
class NothingMore:
    """A Prefetch where there is no host tier: `tokens` are all there will be."""

    tokens: int
    done: bool = True

    @property
    def wanted(self) -> int:
        return self.tokens

    def close(self) -> None:
        pass


class Prefetcher:
    """Runs all fetches. A block that one of them brings is `claimed` by it, and not asked for again."""

    def __init__(
        self,
        tree: TierTree,
        mover: PageMover,
        keys: BlockKeys,
        options: HiRadixOptions,
        counters: Counters,
        leftovers: Leftovers,
        saver: Saver,
    ) -> None:
        self._tree = tree
        self._mover = mover
        self._block_keys = keys
        self._block = keys.block
        self._threshold = options.prefetch_threshold
        self._room = int(options.prefetch_share * mover.host_pages)
        self._counters = counters
        self._leftovers = leftovers
        self._saver = saver
        self._fetches: list[Fetch] = []
        self._claims: dict[bytes, Fetch] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, key: PrefixKey) -> Fetch:
        known, blocks = self._known(key), len(key) // self._block
        if self.closed or not self._mover.stores or blocks * self._block - known < self._threshold:
            fetch = Fetch(self, key.head(0), [], known)
            self._end(fetch)
            return fetch
        own = PrefixKey(key.tokens[: blocks * self._block].copy(), key.namespace, key.memo)
        fetch = Fetch(self, own, self._block_keys.of(own, blocks), known)
        self._fetches.append(fetch)
        self._ask(fetch)
        return fetch

    def poll(self) -> None:
        for fetch in list(self._fetches):
            if fetch.finding is not None:
                if fetch.finding.done:
                    self._found(fetch, fetch.finding.result)
            elif fetch.groups:
                self._arrive(fetch)
            elif fetch.keys[fetch.first] not in self._claims:
                self._ask(fetch)

    def close(self, fetch: Fetch) -> None:
        """Let go of a fetch; what is under way is cancelled, unless another one waits for it."""
        if fetch.done:
            return
        fetch.stop = fetch.next
        if fetch.groups and any(one.waits and self._claims.get(one.keys[one.first]) is fetch for one in self._fetches):
            fetch.done = True  # for its caller
            return
        self._end(fetch)

    def cancel(self) -> None:
        """Let go of everything."""
        for fetch in list(self._fetches):
            self._end(fetch)

    def check(self) -> None:
        claims = {key for fetch in self._fetches for key in fetch.keys}
        assert claims >= set(self._claims), "blocks are claimed by a fetch that is over"
        room = sum(group.host.size for fetch in self._fetches for group in fetch.groups)
        limit = self._room + room
        assert 0 <= self._room <= limit, f"{self._room} host pages may be fetched into"

    # ---- the life of a fetch ---------------------------------------------------------------------------------------

    def _ask(self, fetch: Fetch) -> None:
        """Ask storages for what is not here, or wait for another fetch that brings it."""
        fetch.tokens = max(fetch.tokens, self._known(fetch.key))
        fetch.first = fetch.tokens // self._block
        if len(fetch.key) - fetch.tokens < self._threshold:
            self._end(fetch)
            return
        if fetch.keys[fetch.first] in self._claims:
            return
        for key in fetch.keys[fetch.first :]:
            self._claims.setdefault(key, fetch)
        fetch.finding = self._mover.find(fetch.keys[fetch.first :])

    def _found(self, fetch: Fetch, blocks: int) -> None:
        fetch.finding = None
        fetch.next, fetch.stop = fetch.first, fetch.first + blocks
        fetch.wanted = max(fetch.tokens, fetch.stop * self._block)
        self._disclaim(fetch, fetch.keys[fetch.stop :])
        if fetch.wanted - fetch.tokens < self._threshold:
            fetch.wanted = fetch.tokens
            self._end(fetch)
        else:
            self._go_on(fetch)

    def _arrive(self, fetch: Fetch) -> None:
        """Enter the groups that have come, in their order; a gap ends it."""
        while fetch.groups and fetch.groups[0].job.done:
            group = fetch.groups.popleft()
            came = self._enter(fetch, group)
            self._disclaim(fetch, fetch.keys[group.start : group.start + group.host.shape[0]])
            if not came:
                self._end(fetch)
                return
        self._go_on(fetch)

    def _go_on(self, fetch: Fetch) -> None:
        while len(fetch.groups) < AHEAD and fetch.next < fetch.stop:
            host = self._take(fetch, min(GROUP, fetch.stop - fetch.next))
            if not host.shape[0]:
                if not fetch.groups:
                    self._counters.fetch_skipped += (fetch.stop - fetch.next) * self._block
                    fetch.stop = fetch.next
                break
            self._room -= host.size
            keys = fetch.keys[fetch.next : fetch.next + host.shape[0]]
            fetch.groups.append(Group(self._mover.fetch(keys, host), fetch.next, host))
            fetch.next += host.shape[0]
        if not fetch.groups:
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        fetch.done = True
        fetch.wanted = fetch.tokens if fetch.wanted is None else fetch.wanted
        if fetch.finding is not None:
            self._mover.cancel(fetch.finding)
            fetch.finding = None
        while fetch.groups:
            group = fetch.groups.popleft()
            pages = group.host.reshape(-1)
            self._room += pages.size
            self._leftovers.leave(group.job, pages)
            self._tree.host.give(pages)
        self._disclaim(fetch, fetch.keys)
        if fetch in self._fetches:
            self._fetches.remove(fetch)

    def _disclaim(self, fetch: Fetch, keys: list[bytes]) -> None:
        for key in keys:
            if self._claims.get(key) is fetch:
                del self._claims[key]

    # ---- pages -----------------------------------------------------------------------------------------------------

    def _known(self, key: PrefixKey) -> int:
        """How many tokens are on the device or the host."""
        _, end = self._tree.extent(self._tree.tokens.find(key.tokens, key.namespace))
        return end

    def _take(self, fetch: Fetch, blocks: int) -> NDArray[np.int64]:
        """Return host pages [up to `blocks`, block_pages]. What stays of the prompt's copies is not given up for it."""
        size = self._mover.block_pages
        blocks = min(blocks, self._room // size)
        path = self._tree.tokens.find(fetch.key.tokens, fetch.key.namespace)
        copied = [node for node in path.nodes if node.data.host.size]
        pages = self._tree.take_host(max(0, blocks) * size, FETCHING, copied[-1] if copied else None)
        whole = pages.size - pages.size % size
        self._free(pages[whole:])
        return pages[:whole].reshape(-1, size)

    def _free(self, pages: NDArray[np.int64]) -> None:
        self._tree.host.unpin(pages)
        self._tree.host.give(pages)

    def _enter(self, fetch: Fetch, group: Group) -> bool:
        """Add what a group has brought to the tree, behind what is on the host; whether all of it came and could be."""
        tree, result = self._tree, group.job.result
        self._room += group.host.size
        came = group.host[:result].reshape(-1)
        self._free(group.host[result:].reshape(-1))
        key = fetch.key.head((group.start + result) * self._block)
        path = tree.tokens.find(key.tokens, key.namespace)
        tree.end_node(path)
        start = group.start * self._mover.block_pages
        known = self._copied(path, start)
        if not came.size or known < start:
            self._free(came)
            return False
        self._free(came[: known - start])
        came = came[known - start :]
        if came.size:
            self._counters.fetched += came.size * tree.page_size
            self._attach(path, key, came)
        fetch.tokens = max(fetch.tokens, self._known(fetch.key))
        return bool(result == group.host.shape[0])

    def _copied(self, path: RadixPath[Entry], wanted: int) -> int:
        """How many pages of a path are on the host, or on their way; what the device has is saved if that is too few
        for `wanted`, as nothing may be on the host behind a gap.
        """

        def copied() -> int:
            return sum(node.data.host.size for node in path.nodes)

        if copied() < wanted:
            on_device: list[Node] = [node for node in path.nodes if node.data.device.size]
            if on_device:
                self._saver.save(on_device[-1])
        return copied()

    def _attach(self, path: RadixPath[Entry], key: PrefixKey, pages: NDArray[np.int64]) -> None:
        tree = self._tree
        tree.host.unpin(pages)
        tree.host.brought[pages] = True
        tree.host.stored[pages] = ~np.uint64(0)
        tree.tick += 1
        tree.used(path.node, 0)
        for node in list(path.nodes):
            run = pages[: len(node) // tree.page_size - node.data.host.size]
            pages = pages[run.size :]
            if run.size:
                tree.add_host(node, run, READY)
        if pages.size:
            tree.add_host(tree.add_leaf(path, key, 0), pages, READY)
        tree.changed()
