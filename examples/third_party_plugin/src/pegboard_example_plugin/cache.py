"""A prefix cache in one dictionary: simple, correct, and slow for long prompts.

Its key is the whole prompt up to the end of a page, so a page is found only behind exactly what it was computed behind.
A prompt of n pages makes n keys of up to n pages each: quadratic, which is why the built-in caches do otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pegboard.core.interfaces import InsertResult, PrefixCache, PrefixMatch
from pegboard.toolkit.cache.pages import pages_of, slots_of

from pegboard_example_plugin.options import WholePromptOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pegboard.core.interfaces import CacheHandle, PrefixCacheContext, PrefixKey


@dataclass(slots=True, eq=False)
class Entry:
    """One cached page. `parent` is the page before it; `children` counts the pages that come right after it."""

    said: tuple[str, bytes]
    page: int
    parent: Entry | None
    children: int = 0
    locks: int = 0
    last_used: int = 0
    evicted: bool = False

    def path(self) -> Iterator[Entry]:
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent


@dataclass(slots=True, eq=False)
class Handle:
    """The last page of a path (None for the empty one) and how often this handle is locked."""

    entry: Entry | None = None
    locks: int = 0


class WholePromptCache(PrefixCache[WholePromptOptions]):
    """Evicts the least recently used page that nothing follows, or the oldest such."""

    def __init__(self, options: WholePromptOptions, ctx: PrefixCacheContext) -> None:
        super().__init__(options, ctx)
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._cached_pages: set[int] = set()
        self._locked_pages = 0
        self._clock = 0

    def match(self, key: PrefixKey) -> PrefixMatch:
        entries = self._touch(self._find(key))
        return PrefixMatch(self._slots(entries), Handle(entries[-1] if entries else None))

    def lock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, Handle)
        if handle.entry is not None:
            if handle.entry.evicted:
                raise ValueError("this prefix has been evicted since it was matched; match it again")
            for entry in handle.entry.path():
                self._locked_pages += entry.locks == 0
                entry.locks += 1
        handle.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, Handle)
        if not handle.locks:
            raise ValueError("this handle is not locked")
        handle.locks -= 1
        if handle.entry is not None:
            for entry in handle.entry.path():
                entry.locks -= 1
                self._locked_pages -= entry.locks == 0

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if slots.shape != (len(key),):
            raise ValueError(f"{len(key)} tokens need as many slots, not {list(slots.shape)}")
        taken = len(key) // self.page_size * self.page_size
        pages = pages_of(slots[:taken], self.page_size).tolist()
        entries = self._find(key)
        self._refuse_strangers(entries, pages)
        duplicates = [page for page, entry in zip(pages, entries, strict=False) if page != entry.page]
        if duplicates:
            self.allocator.free(np.array(duplicates, dtype=np.int64))
        for page in pages[len(entries) :]:
            entries.append(self._add(key, page, entries))
        canonical = np.concatenate([self._slots(self._touch(entries)), slots[taken:]])
        return InsertResult(canonical, taken, Handle(entries[-1] if entries else None))

    def evict(self, num_tokens: int) -> int:
        leaves = [(entry.last_used, entry.page, entry) for entry in self._entries.values() if _evictable(entry)]
        heapq.heapify(leaves)
        freed: list[int] = []
        while leaves and len(freed) * self.page_size < num_tokens:
            entry = heapq.heappop(leaves)[-1]
            self._forget(entry)
            freed.append(entry.page)
            parent = entry.parent
            if parent is not None and _evictable(parent):
                heapq.heappush(leaves, (parent.last_used, parent.page, parent))
        self._give_back(freed)
        return len(freed) * self.page_size

    @property
    def evictable_tokens(self) -> int:
        return len(self._entries) * self.page_size - self.locked_tokens

    @property
    def locked_tokens(self) -> int:
        return self._locked_pages * self.page_size

    def reset(self) -> None:
        if self._locked_pages:
            raise RuntimeError(f"{self.locked_tokens} cached tokens are locked")
        for entry in self._entries.values():
            entry.evicted = True
        pages = [entry.page for entry in self._entries.values()]
        self._entries.clear()
        self._give_back(pages)

    def check(self) -> None:
        entries = self._entries.values()
        assert {entry.page for entry in entries} == self._cached_pages, "the pages of the entries are not those cached"
        assert len(entries) == len(self._cached_pages), "a page stands in two entries"
        assert sum(entry.locks > 0 for entry in entries) == self._locked_pages, "the locked pages are miscounted"
        for entry in entries:
            below = [other for other in entries if other.parent is entry]
            assert entry.children == len(below), f"page {entry.page} has {len(below)} children, not {entry.children}"
            assert entry.locks >= sum(other.locks for other in below), f"page {entry.page} is locked less than its path"

    def _find(self, key: PrefixKey) -> list[Entry]:
        """The cached pages of a key, from its beginning."""
        entries = []
        for end in range(self.page_size, len(key) + 1, self.page_size):
            entry = self._entries.get(_said(key, end))
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _add(self, key: PrefixKey, page: int, before: list[Entry]) -> Entry:
        parent = before[-1] if before else None
        entry = Entry(_said(key, (len(before) + 1) * self.page_size), page, parent)
        if parent is not None:
            parent.children += 1
        self._entries[entry.said] = entry
        self._cached_pages.add(page)
        self.version += 1
        return entry

    def _forget(self, entry: Entry) -> None:
        entry.evicted = True
        del self._entries[entry.said]
        if entry.parent is not None:
            entry.parent.children -= 1

    def _give_back(self, pages: list[int]) -> None:
        if pages:
            self._cached_pages.difference_update(pages)
            self.allocator.free(np.array(pages, dtype=np.int64))
            self.version += 1

    def _refuse_strangers(self, entries: list[Entry], pages: list[int]) -> None:
        """Raise ValueError for a page outside of the pool, and for one that is cached already for other tokens."""
        own = {entry.page for entry, page in zip(entries, pages, strict=False) if entry.page == page}
        for page in pages:
            if not 1 <= page <= self.allocator.num_pages:
                raise ValueError(f"page {page} is not in the pool: its pages run from 1 to {self.allocator.num_pages}")
            if page not in own and page in self._cached_pages:
                raise ValueError(f"page {page} is cached already, for other tokens")

    def _touch(self, entries: list[Entry]) -> list[Entry]:
        self._clock += 1
        for entry in entries:
            if self.options.evict == "least_used" or not entry.last_used:
                entry.last_used = self._clock
        return entries

    def _slots(self, entries: list[Entry]) -> NDArray[np.int64]:
        return slots_of(np.array([entry.page for entry in entries], dtype=np.int64), self.page_size)


def _said(key: PrefixKey, end: int) -> tuple[str, bytes]:
    return key.namespace, key.tokens[:end].tobytes()


def _evictable(entry: Entry) -> bool:
    return not entry.children and not entry.locks
