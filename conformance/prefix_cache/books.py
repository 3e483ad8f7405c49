"""A caller of a prefix cache that keeps the books: which caller owns which page, and what the cache must know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pegboard.conformance.fakes import CountingAllocator
from pegboard.core.interfaces.keys import PrefixKey, PrefixMemo
from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixCacheContext, PrefixMatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.prefix_cache import CacheHandle

Prefix = tuple[str, tuple[int, ...]]
"""A namespace and tokens in whole pages."""


def key_of(tokens: Sequence[int], namespace: str = "", memo: PrefixMemo | None = None) -> PrefixKey:
    return PrefixKey(np.array(tokens, dtype=np.int64), namespace, memo)


def run_of(*chars: int, page_size: int) -> list[int]:
    """Return tokens in which every char fills a page. The pages of 2 and 3, 4 and 5... differ in their last token
    alone.
    """
    return [token for char in chars for token in (*[char // 2] * (page_size - 1), char)]


@dataclass(eq=False)
class Lock:
    """A lock on the path of the first `length` tokens of a key, and on the `promised` ones that were found after it."""

    handle: CacheHandle
    tokens: tuple[int, ...]
    namespace: str
    length: int
    promised: int = 0


class Books:
    """Calls a cache as the pipeline does, and checks after every call that free + cached + held = all.

    `held` are the pages of the caller. `known` maps every prefix that the cache took to the page that ends it; when
    pages are evicted they are struck out, so that it always says what `match` must find. `locks` are the caller's.
    """

    def __init__(
        self,
        build: Callable[[PrefixCacheContext], PrefixCache],
        num_pages: int = 64,
        page_size: int = 1,
        services: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.allocator = CountingAllocator(num_pages, page_size)
        self.cache = build(PrefixCacheContext(self.allocator, page_size, services))
        self.page_size = page_size
        self.held: set[int] = set()
        self.known: dict[Prefix, int] = {}
        self.locks: list[Lock] = []

    def match(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> PrefixMatch:
        """`match`, compared with what is known."""
        owned = set(self.allocator.held)
        found = self.cache.match(key_of(tokens, namespace, memo))
        assert self.allocator.held == owned, "match changed the owner of a page"
        wanted = self.expected(tokens, namespace)
        assert found.slots.tolist() == wanted, (
            f"{list(tokens)} in {namespace!r}: not the slots of the longest known prefix"
        )
        assert len(found) == len(wanted)
        assert found.slots.dtype == np.int64, f"slots are {found.slots.dtype}"
        self.check()
        return found

    def lock(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> Lock:
        """Match and lock what is found."""
        found = self.match(tokens, namespace, memo=memo)
        lock = self.lock_handle(found.handle, tokens, namespace, len(found))
        lock.promised = found.promised
        return lock

    def lock_handle(self, handle: CacheHandle, tokens: Sequence[int], namespace: str, length: int) -> Lock:
        self.cache.lock(handle)
        promised = next((lock.promised for lock in self.locks if lock.handle is handle), 0)
        self.locks.append(Lock(handle, tuple(tokens), namespace, length, promised))
        self.check()
        return self.locks[-1]

    def lock_stale(self, lock: Lock, slots: Sequence[int]) -> None:
        """Lock a handle after evictions: refused, with nothing changed, unless all is where it was, at `slots`."""
        intact = self.expected(lock.tokens[: lock.length], lock.namespace) == list(slots)
        try:
            self.cache.lock(lock.handle)
        except ValueError:
            self.check()
            return
        assert intact, f"a handle is locked, but of its path {lock.tokens[: lock.length]} some was evicted"
        self.locks.append(lock)
        self.check()

    def unlock(self, lock: Lock) -> None:
        self.cache.unlock(lock.handle)
        self.locks.remove(lock)
        self.check()

    def insert(
        self,
        tokens: Sequence[int],
        namespace: str = "",
        *,
        slots: NDArray[np.int64] | None = None,
        priority: int = 0,
        memo: PrefixMemo | None = None,
    ) -> InsertResult:
        """Insert with new pages, or with the given slots, whose pages the caller or the cache has."""
        if slots is None:
            slots = self.alloc(len(tokens))
        self.compute(tokens, namespace, slots)
        given = slots.copy()
        taken = self.page_size * (len(tokens) // self.page_size)
        wanted = self.expected(tokens, namespace)
        wanted += given[len(wanted) :].tolist()
        key = key_of(tokens, namespace, memo)
        result = self.cache.insert(key, slots, priority=priority)
        self._untouched("insert", key, tokens, slots, given)
        self._compare(result, taken, wanted)
        self._enter(tokens, namespace, wanted, given[:taken])
        return result

    def extend(
        self,
        lock: Lock,
        tokens: Sequence[int],
        *,
        slots: NDArray[np.int64] | None = None,
        priority: int = 0,
        memo: PrefixMemo | None = None,
    ) -> InsertResult:
        """Extend a locked path to `tokens` with new pages for the rest, or with the slots given for it."""
        start = lock.length
        assert tuple(tokens[:start]) == lock.tokens[:start], "a path is extended by what it does not begin"
        if slots is None:
            slots = self.alloc(len(tokens) - start)
        self.compute(tokens, lock.namespace, slots, start)
        given = slots.copy()
        taken = self.page_size * (len(tokens) // self.page_size)
        wanted = self.expected(tokens, lock.namespace)
        wanted += given[len(wanted) - start :].tolist()
        key = key_of(tokens, lock.namespace, memo)
        result = self.cache.extend(lock.handle, key, slots, priority=priority)
        self._untouched("extend", key, tokens, slots, given)
        self._compare(result, taken - start, wanted[start:])
        self._enter(tokens, lock.namespace, wanted, given[: taken - start])
        return result

    def _untouched(
        self, call: str, key: PrefixKey, tokens: Sequence[int], slots: NDArray[np.int64], given: NDArray[np.int64]
    ) -> None:
        assert np.array_equal(key.tokens, tokens), f"{call} changed the tokens of its key"
        assert np.array_equal(slots, given), f"{call} wrote into the caller's slots: the canonical ones are its answer"

    def _compare(self, result: InsertResult, taken: int, wanted: list[int]) -> None:
        assert result.taken == taken, f"took {result.taken} of {len(wanted)} tokens, not its {taken} in whole pages"
        assert result.slots.tolist() == wanted, "not the slots that the cache had, followed by the caller's"
        assert result.slots.dtype == np.int64, f"slots are {result.slots.dtype}"

    def _enter(self, tokens: Sequence[int], namespace: str, slots: list[int], taken: NDArray[np.int64]) -> None:
        """Note that the cache has the tokens at these slots, and that the `taken` ones are the caller's no more."""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = slots[end - 1] // self.page_size
            self.known.setdefault((namespace, tuple(tokens[:end])), page)
        self.held.difference_update((taken // self.page_size).tolist())
        self.check()

    def evict(self, num_tokens: int) -> int:
        """`evict`, and strike out what went: unlocked pages, ends before what they continue, as many as asked for."""
        owned, room = set(self.allocator.held), self.evictable
        freed = self.cache.evict(num_tokens)
        for name in ("locked_tokens", "evictable_tokens", "version"):
            value = getattr(self.cache, name)
            assert type(value) is int, f"{name} is a {type(value).__name__}, not an int"
        assert type(freed) is int, f"evict answers with a {type(freed).__name__}, not with an int"
        gone = owned - self.allocator.held
        assert freed == len(gone) * self.page_size, f"{freed} tokens reported, but {len(gone)} pages freed"
        assert freed >= min(num_tokens, room), f"{freed} tokens freed of {num_tokens} wanted and {room} evictable"
        assert not gone & self.held, f"pages {sorted(gone & self.held)} were evicted, but belong to the caller"
        assert not gone & self.locked_pages, f"locked pages were evicted: {sorted(gone & self.locked_pages)}"
        self.known = {prefix: page for prefix, page in self.known.items() if page not in gone}
        for namespace, tokens in self.known:
            before = tokens[: -self.page_size]
            assert not before or (namespace, before) in self.known, f"{before} was evicted before its end {tokens}"
        self.check()
        return freed

    def reset(self) -> None:
        self.cache.reset()
        self.known.clear()
        self.check()

    def alloc(self, num_tokens: int) -> NDArray[np.int64]:
        """Return slots in new pages of the caller."""
        slots = self.allocator.alloc_slots(num_tokens)
        self.held.update((slots // self.page_size).tolist())
        return slots

    def compute(self, tokens: Sequence[int], namespace: str, slots: NDArray[np.int64], start: int = 0) -> None:
        """Before the tokens from `start` on are given to the cache: write their KV at `slots`, where any is kept."""

    def expected(self, tokens: Sequence[int], namespace: str = "") -> list[int]:
        """Return the slots of the longest known prefix."""
        slots: list[int] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.known.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            slots += range(page * self.page_size, (page + 1) * self.page_size)
        return slots

    @property
    def locked_pages(self) -> set[int]:
        pages: set[int] = set()
        for lock in self.locks:
            pages |= {slot // self.page_size for slot in self.expected(lock.tokens[: lock.length], lock.namespace)}
        return pages

    @property
    def locked(self) -> bool:
        """Whether a lock holds anything, so that a reset is refused."""
        return bool(self.locked_pages) or any(lock.promised for lock in self.locks)

    @property
    def evictable(self) -> int:
        return self.page_size * (len(self.known) - len(self.locked_pages))

    def check(self) -> None:
        """All books agree: pages of the allocator, the caller and the cache, and the cache's own counters."""
        lost = (self.held | set(self.known.values())) - self.allocator.held
        assert not lost, f"pages {sorted(lost)} are in use, but were freed"
        leaked = self.allocator.held - self.held - set(self.known.values())
        assert not leaked, f"pages {sorted(leaked)} have no owner, but were not freed"
        locked = self.page_size * len(self.locked_pages)
        assert self.cache.locked_tokens == locked, f"{locked} tokens locked, the cache says {self.cache.locked_tokens}"
        evictable = self.evictable
        assert self.cache.evictable_tokens == evictable, (
            f"{evictable} tokens evictable, the cache says {self.cache.evictable_tokens}"
        )
        assert self.cache.cached_tokens == locked + evictable, "cached_tokens is not locked and evictable together"
        self.cache.check()
