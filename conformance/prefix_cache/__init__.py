"""The conformance suite of PrefixCache."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_cache.base import pages
from pegboard.conformance.prefix_cache.books import key_of, run_of
from pegboard.conformance.prefix_cache.describing import DescribingTests
from pegboard.conformance.prefix_cache.extending import ExtendingTests
from pegboard.conformance.prefix_cache.finding import FindingTests
from pegboard.conformance.prefix_cache.growth import GrowthTests
from pegboard.conformance.prefix_cache.keeping import KeepingTests
from pegboard.conformance.prefix_cache.keys import KeyTests
from pegboard.conformance.prefix_cache.machine import CacheMachine
from pegboard.conformance.prefix_cache.promises import PromiseTests
from pegboard.conformance.prefix_cache.refusals import RefusalTests
from pegboard.conformance.properties import properties
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.keys import PrefixMemo
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext


class PrefixCacheContract(
    FindingTests, KeyTests, KeepingTests, ExtendingTests, RefusalTests, GrowthTests, PromiseTests, DescribingTests
):
    """What is inserted is found, what is locked stays, what goes comes back, and every page has one owner.

    The tests call the cache through `Books`, which checks all owners and counters after every call.
    """

    contract = "prefix_cache"

    # What every cache does, one that keeps nothing included.

    @pages
    def test_a_miss_is_empty(self, page_size: int) -> None:
        books = self.books(page_size)
        for tokens in ([], [1], run_of(1, 2, page_size=page_size)):
            found = books.match(tokens)
            assert (len(found), found.promised) == (0, 0)

    def test_an_empty_match_can_be_locked(self) -> None:
        books = self.books()
        locks = [books.lock([1, 2]), books.lock([])]
        assert books.cache.locked_tokens == 0
        for lock in locks:
            books.unlock(lock)

    def test_unlocking_what_is_not_locked_raises(self) -> None:
        books = self.books()
        handle = books.match([1, 2]).handle
        with pytest.raises(ValueError):
            books.cache.unlock(handle)
        books.check()

    def test_nothing_can_be_evicted_from_an_empty_cache(self) -> None:
        books = self.books()
        assert books.evict(5) == 0
        assert books.evict(0) == 0

    def test_lengths_that_differ_raise_and_change_nothing(self) -> None:
        books = self.books()
        slots = books.alloc(3)
        for tokens in ([1, 2], [1, 2, 3, 4]):
            with pytest.raises(ValueError):
                books.cache.insert(key_of(tokens), slots)
            books.check()

    def test_an_empty_cache_resets(self) -> None:
        self.books().reset()

    @pages
    def test_an_insert_of_less_than_a_page_takes_nothing(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = [1] * (page_size - 1)
        result = books.insert(tokens)
        assert result.taken == 0
        lock = books.lock_handle(result.handle, tokens, "", 0)
        books.unlock(lock)

    @pages
    def test_extending_with_less_than_a_page_takes_nothing(self, page_size: int) -> None:
        books = self.books(page_size)
        lock = books.lock([])
        result = books.extend(lock, [1] * (page_size - 1))
        assert result.taken == 0
        books.unlock(books.lock_handle(result.handle, [], "", 0))

    # What one that declares `reuse` does.

    @capability("reuse")
    @pages
    def test_a_memo_changes_no_answer(self, page_size: int) -> None:
        """One memo serves a sequence through its whole life: found in part, inserted, grown, evicted, inserted anew."""
        books = self.books(page_size)
        memo = PrefixMemo()
        chunk, whole = run_of(1, 2, 3, page_size=page_size), run_of(1, 2, 3, 4, 5, page_size=page_size)
        books.match(whole, memo=memo)
        books.insert(run_of(1, 2, 9, page_size=page_size))
        books.match(whole, memo=memo)
        lock = books.lock_handle(books.insert(chunk, memo=memo).handle, chunk, "", len(chunk))
        books.match(chunk[:-1], memo=memo)
        books.extend(lock, whole, memo=memo)
        assert len(books.match(whole, memo=memo)) == 5 * page_size
        books.unlock(lock)
        books.evict(1000)
        assert len(books.match(whole, memo=memo)) == 0
        books.insert(whole, memo=memo)
        assert len(books.match(whole)) == 5 * page_size

    @capability("reuse")
    @pages
    def test_any_sequence_of_calls_agrees_with_a_dict(self, page_size: int) -> None:
        self.books(page_size)  # skips here where the provider objects
        attributes = {"make": staticmethod(lambda: self.books(page_size, num_pages=16)), "page_size": page_size}
        run_state_machine_as_test(type("Machine", (CacheMachine,), attributes), settings=properties(60, 40))

    # What one without `reuse` does.

    @lacks("prefetch")
    def test_without_prefetch_it_is_refused(self) -> None:
        cache: PrefixCache = self.build(PrefixCacheContext(CountingAllocator(8), 1))
        assert not hasattr(cache, "prefetch"), "who finds this method calls it: declare the capability prefetch"

    @lacks("reuse")
    @pages
    def test_without_reuse_nothing_is_taken_or_found(self, page_size: int) -> None:
        allocator = CountingAllocator(8, page_size)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, page_size))
        tokens = run_of(1, 2, page_size=page_size)
        slots = allocator.alloc_slots(len(tokens))
        for _ in range(2):
            result = cache.insert(key_of(tokens), slots)
            assert (result.taken, result.slots.tolist()) == (0, slots.tolist())
            cache.lock(result.handle)
            assert len(cache.match(key_of(tokens))) == 0
            assert (cache.cached_tokens, cache.locked_tokens, cache.evict(1000)) == (0, 0, 0)
            cache.unlock(result.handle)
            cache.reset()
            cache.check()
        assert (allocator.taken_back, len(allocator.held)) == (0, 2)
