"""The suite of PrefixCache: what remains of thousands of prefixes that came and went, and what evicting them costs."""

from __future__ import annotations

import itertools

import pytest

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_cache.base import PrefixSuite
from pegboard.conformance.prefix_cache.books import key_of
from pegboard.conformance.rig.footprint import growth
from pegboard.conformance.rig.steps import count_steps
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext

_PAGES, _ROUNDS, _SLACK = 24, 800, 16 * 1024
_MOST = 8
"""By what the cost of evicting half of all may grow where there is four times as much: n log n comes to less than 6,
a look at everything for each page to 16."""


class GrowthTests(PrefixSuite):
    """Of caches that declare `reuse`."""

    contract = "prefix_cache"

    @capability("reuse")
    @pytest.mark.parametrize("page_size", [1, 4])
    def test_what_is_evicted_leaves_nothing_behind(self, page_size: int) -> None:
        """A server is up for months, and namespaces come from clients: nothing may grow with what has been."""
        allocator = CountingAllocator(_PAGES, page_size)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, page_size))
        turns = itertools.count()

        def rounds(count: int = _ROUNDS) -> None:
            for turn in itertools.islice(turns, count):
                self._turn(cache, allocator, turn)

        rounds(200)
        grown = growth(rounds, _SLACK, cache, allocator)
        assert grown <= _SLACK, (
            f"the cache grows by {grown / _ROUNDS:.0f} bytes with every prefix that is inserted and evicted again: "
            "what it notes of a page, a handle or a namespace must go with the page"
        )

    def _turn(self, cache: PrefixCache, allocator: CountingAllocator, turn: int) -> None:
        """Play a request that matches, computes, inserts, is locked while it runs, and lets go."""
        size = allocator.page_size
        key = key_of([token for part in (turn // 4, turn, turn + 1) for token in [part] * size], f"{turn // 4}")
        held = cache.match(key)
        cache.lock(held.handle)
        missing = len(key) - len(held)
        if missing > allocator.free_tokens:
            cache.evict(missing - allocator.free_tokens)
        result = cache.extend(held.handle, key, allocator.alloc_slots(missing))
        cache.lock(result.handle)
        cache.unlock(held.handle)
        cache.match(key)
        cache.unlock(result.handle)
        if turn % 50 == 0:
            cache.reset()

    @capability("reuse")
    @pytest.mark.parametrize("shape", ["leaves", "chain"])
    def test_eviction_does_not_look_at_everything_for_each_page(self, shape: str) -> None:
        """Where memory is short, each step evicts, and all requests wait for it."""
        n = 50
        few = self._cost(n, shape)
        limit = _MOST * few
        assert self._cost(4 * n, shape, limit) <= limit, (
            f"to evict half of {n} pages takes {few} steps, and of {4 * n} pages more than {limit}: find all victims "
            "of a call in one go, or keep them in order of eviction"
        )

    def _cost(self, n: int, shape: str, limit: int = 1 << 62) -> int:
        allocator = CountingAllocator(n, 1)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, 1))
        slots = allocator.alloc_slots(n)
        for index in range(n):
            if shape == "leaves":
                cache.insert(key_of([index + 1]), slots[index : index + 1])
            else:
                cache.insert(key_of(range(1, index + 2)), slots[: index + 1])
        return count_steps(lambda: cache.evict(n // 2), limit)
