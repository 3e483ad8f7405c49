"""The radix cache: every cached prefix is a path in one tree, so that shared beginnings are stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from pegboard.plugins.cache_radix.entry import Entry, Node, no_entry
from pegboard.plugins.cache_radix.options import RadixOptions
from pegboard.toolkit.cache.describing import largest_runs
from pegboard.toolkit.cache.eviction import KEYS, ProtectedSegment, VictimHeap
from pegboard.toolkit.cache.pages import merge_pages, pages_of, slots_of
from pegboard.toolkit.cache.radix_tree import RadixRoot, RadixTree, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CachedRun, CacheHandle, PrefixCacheContext
    from pegboard.toolkit.cache.radix_tree import RadixPath

NO_PAGES = np.empty(0, dtype=np.int64)


class RadixHandle:
    """The node where a path ends (None for the empty path), the path's length, and how often this handle is locked.

    When the node is split it stays the lower half, so the handle goes on meaning the same path.
    """

    __slots__ = ("length", "locks", "node")

    def __init__(self, node: Node | None, length: int) -> None:
        self.node = node
        self.length = length
        self.locks = 0


class RadixCache(PrefixCache[RadixOptions]):
    """Matches and inserts cost one vectorised comparison per node on the path; a victim costs O(log leaves).

    Eviction takes from a leaf's end what it needs and no more, so a long prefix shrinks before it is gone.
    """

    def __init__(self, options: RadixOptions, ctx: PrefixCacheContext) -> None:
        super().__init__(options, ctx)
        self._tree: RadixTree[Entry] = RadixTree(self.page_size, make_root=no_entry, split=self._split_entry)
        self._victims = VictimHeap[Entry](KEYS[options.eviction], lambda entry: entry.evictable)
        self._protected: ProtectedSegment[Entry] | None = None
        if options.eviction == "slru":
            self._protected = ProtectedSegment(int(options.protected_share * self.allocator.total_tokens))
        self._owned = np.zeros(self.allocator.num_pages + 1, dtype=np.bool_)
        self._locked = 0
        self._tick = 0

    def matched_length(self, key: PrefixKey) -> int:
        path = self._tree.find(key.tokens, key.namespace)
        # A node that is found in part is not split for a look, and its other part is as recent then.
        self._touch(path.nodes)
        return path.length

    def match(self, key: PrefixKey) -> PrefixMatch:
        path = self._find(key)
        self._touch(path.nodes)
        return PrefixMatch(slots_of(_pages(path.nodes), self.page_size), RadixHandle(path.node, path.length))

    def lock(self, handle: CacheHandle) -> None:
        held = self._checked(handle)
        if held.node is not None:
            if not held.node.attached or held.node.end != held.length:
                raise ValueError("cannot lock a prefix that has been evicted since it was matched: match it again")
            for node in held.node.ancestry():
                if not node.data.locks:
                    self._locked += len(node)
                node.data.locks += 1
            self._victims.update(held.node.data)
        held.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        held = self._checked(handle)
        if not held.locks:
            raise ValueError("this handle is not locked")
        held.locks -= 1
        if held.node is None:
            return
        for node in held.node.ancestry():
            node.data.locks -= 1
            if not node.data.locks:
                self._locked -= len(node)
        self._victims.update(held.node.data)

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if slots.shape != (len(key),):
            raise ValueError(f"{len(key)} tokens, but slots {list(slots.shape)}")
        return self._insert(None, key, slots, priority)

    def extend(
        self, handle: CacheHandle, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0
    ) -> InsertResult:
        held = self._checked(handle)
        if not held.locks:
            raise ValueError("a path that is not locked cannot be extended")
        if slots.shape != (len(key) - held.length,):
            raise ValueError(f"{len(key)} tokens, but a path of {held.length} and slots {list(slots.shape)}")
        return self._insert(held.node, key, slots, priority)

    def _insert(self, after: Node | None, key: PrefixKey, slots: NDArray[np.int64], priority: int) -> InsertResult:
        """Insert what follows the path to `after` (None for the empty one); `slots` are those of the rest."""
        start = 0 if after is None else after.end
        canonical = np.array(slots, dtype=np.int64)
        taken = self._tree.aligned(len(key)) - start
        given = pages_of(canonical[:taken], self.page_size)
        path = self._find(key, after)
        cached = _pages(path.nodes if after is None else path.nodes[1:])
        merge_pages(self.allocator, self._owned, cached, given, canonical)
        fresh = given[cached.shape[0] :]
        self._tick += 1
        before = path.node
        if before is not None:
            for node in before.ancestry():
                node.data.last_access = self._tick
                node.data.priority = max(node.data.priority, priority)
        if fresh.size:
            leaf = self._tree.extend(path, key.tokens, Entry(fresh.copy(), self._tick, priority))
            leaf.data.node = leaf
            self._owned[fresh] = True
            self._victims.update(leaf.data)
            self.version += 1
        if before is not None:
            self._victims.update(before.data)
        return InsertResult(canonical, taken, RadixHandle(path.node, path.length))

    def evict(self, num_tokens: int) -> int:
        freed: list[NDArray[np.int64]] = []
        count = 0
        while count < num_tokens and (entry := self._victims.pop()) is not None:
            node = _node_of(entry)
            wanted = -(-(num_tokens - count) // self.page_size) * self.page_size
            freed.append(self._shrink(node, wanted) if wanted < len(node) else self._drop(node))
            count += freed[-1].shape[0] * self.page_size
        self._give_back(freed)
        return count

    @property
    def evictable_tokens(self) -> int:
        return self._tree.num_tokens - self._locked

    @property
    def locked_tokens(self) -> int:
        return self._locked

    def reset(self) -> None:
        if self._locked:
            raise RuntimeError(f"cannot reset: {self._locked} cached tokens are locked")
        entries = [node.data for node in self._tree.nodes()]
        freed = [entry.pages for entry in entries]
        for entry in entries:
            entry.node = None
        self._tree.clear()
        self._victims.clear()
        if self._protected is not None:
            self._protected.clear()
        self._give_back(freed)

    def describe(self, most: int) -> list[CachedRun]:
        return largest_runs(self._tree, most, lambda entry: (entry.pages.shape[0], entry.locks > 0))

    def check(self) -> None:
        self._tree.check()
        pages: list[NDArray[np.int64]] = [NO_PAGES]
        locked = 0
        for node in self._tree.nodes():
            entry = node.data
            below = sum(child.data.locks for child in node.children.values())
            pages.append(entry.pages)
            locked += len(node) if entry.locks else 0
            assert entry.pages.shape[0] * self.page_size == len(node), f"{node!r} has {entry.pages.shape[0]} pages"
            assert entry.locks >= below, f"{node!r} has {entry.locks} locks, but its children {below}"
            assert entry.node is node, f"{node!r} is not the node of its entry"
            assert entry.place >= 0 or not entry.evictable, f"{node!r} is evictable, but no candidate"
        assert locked == self._locked, f"{locked} tokens are locked, but {self._locked} counted"
        every = np.sort(np.concatenate(pages))
        assert np.array_equal(every, np.flatnonzero(self._owned)), "the pages of the tree are not those that are owned"
        self._victims.check()
        if self._protected is not None:
            self._protected.check()

    def _find(self, key: PrefixKey, after: Node | None = None) -> RadixPath[Entry]:
        """Return the longest cached path (its part from `after` on, where given), ending where a node ends."""
        path = self._tree.find(key.tokens, key.namespace, after)
        if not path.whole:
            upper = self._tree.cut(path)
            if upper is not None:
                upper.data.node = upper
                if self._protected is not None:
                    self._protected.split(upper)
        return path

    def _touch(self, nodes: list[Node]) -> None:
        """Note that a path was used."""
        self._tick += 1
        for node in nodes:
            node.data.last_access = self._tick
            node.data.hits += 1
        if self._protected is not None:
            for node in self._protected.promote(reversed(nodes), self._tick):
                self._victims.update(node.data)
        if nodes:
            self._victims.update(nodes[-1].data)

    def _split_entry(self, entry: Entry, at: int) -> tuple[Entry, Entry]:
        return entry.split(at // self.page_size), entry

    def _shrink(self, node: Node, tokens: int) -> NDArray[np.int64]:
        """Cut the last `tokens` tokens off a leaf; their pages."""
        pages = node.data.pages
        keep = pages.shape[0] - tokens // self.page_size
        self._tree.trim(node, tokens)
        node.data.pages = shorten(pages, keep)
        if self._protected is not None:
            self._protected.trimmed(node, tokens)
        self._victims.update(node.data)
        return pages[keep:]

    def _drop(self, node: Node) -> NDArray[np.int64]:
        """Remove a leaf, which may make its parent one; its pages."""
        parent = node.parent
        if self._protected is not None:
            self._protected.drop(node)
        self._tree.remove(node)
        node.data.node = None
        if parent is not None and not isinstance(parent, RadixRoot):
            self._victims.update(parent.data)
        return node.data.pages

    def _give_back(self, freed: list[NDArray[np.int64]]) -> None:
        if freed:
            pages = np.concatenate(freed)
            self._owned[pages] = False
            self.allocator.free(pages)
            self.version += 1

    def _checked(self, handle: CacheHandle) -> RadixHandle:
        if not isinstance(handle, RadixHandle):
            raise TypeError(f"this is not a handle of a radix cache: {handle!r}")
        return handle


def _pages(nodes: list[Node]) -> NDArray[np.int64]:
    return np.concatenate([node.data.pages for node in nodes]) if nodes else NO_PAGES


def _node_of(entry: Entry) -> Node:
    if entry.node is None:
        raise AssertionError("a candidate for eviction is not in the tree")
    return entry.node
