"""The suite of PrefixCache: what a cache keeps on the host."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_books import key_of, run_of
from pegboard.conformance.prefix_tier_suite import LENGTH, TierSuite, sizes
from pegboard.conformance.suite import capability, lacks
from pegboard.conformance.tier_fakes import HandJob, HandMover
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext


class HostTierTests(TierSuite):
    """Of caches that declare `host_tier`, and of those that do not."""

    contract = "prefix_cache"

    @lacks("host_tier")
    def test_without_a_host_tier_nothing_is_loaded(self) -> None:
        mover = HandMover(64)
        allocator = CountingAllocator(64)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, 1, mover))
        slots = allocator.alloc_slots(LENGTH)
        cache.insert(key_of(range(LENGTH)), slots)
        cache.evict(LENGTH)
        found = cache.match(key_of(range(LENGTH)))
        assert (found.host_len, found.stored_len, found.loading) == (0, 0, False)
        assert not mover.jobs
        cache.lock(found.handle)
        with pytest.raises(Unsupported):
            cache.load(found.handle, np.empty(0, np.int64))

    @capability("host_tier")
    @sizes
    def test_what_was_evicted_comes_back_from_the_host(self, page_size: int) -> None:
        books = self.tier_books(page_size)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.on_the_host(books, tokens)
        lock = books.lock([*tokens, 7, 7])
        request = books.load(lock)
        books.loaded(request, True)
        longer = books.keep(request)
        assert len(books.match(tokens)) == longer.length == len(request.slots)
        books.unlock(longer)

    @capability("host_tier")
    @sizes
    def test_the_host_goes_on_where_the_device_ends(self, page_size: int) -> None:
        books = self.tier_books(page_size)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.used(books, tokens)
        books.evict(LENGTH // 2 * page_size)
        found = books.match(tokens)
        assert len(found) == LENGTH // 2 * page_size
        assert found.host_len > 0
        assert books.cache.matched_length(key_of(tokens)) == len(found) + found.host_len
        request = self.through(books, tokens)
        assert len(request.slots) == found.host_len

    @capability("host_tier")
    def test_a_fork_on_the_host_is_found_up_to_where_it_leaves(self) -> None:
        books = self.tier_books()
        tokens = [*range(LENGTH)]
        self.on_the_host(books, tokens)
        fork = [*tokens[:30], *range(500, 510)]
        assert len(self.through(books, fork).slots) <= 30
        books.insert(fork)
        assert len(books.match(tokens)) == 30
        self.through(books, tokens)

    @capability("host_tier")
    def test_the_host_keeps_namespaces_apart(self) -> None:
        books = self.tier_books()
        self.on_the_host(books, range(LENGTH), "one")
        assert books.match(range(LENGTH), "two").host_len == 0
        assert books.match(range(LENGTH)).host_len == 0
        self.on_the_host(books, range(LENGTH), "two")
        self.through(books, range(LENGTH), "one")
        self.through(books, range(LENGTH), "two")

    @capability("host_tier")
    def test_a_copy_of_a_page_that_was_evicted_meanwhile_is_none(self) -> None:
        """Nothing holds a device page while it is copied: others may have written to it before the copy was made."""
        books = self.tier_books()
        for turn in range(4):
            tokens = range(100 * turn, 100 * turn + LENGTH)
            books.insert(tokens)
            books.match(tokens)
            books.cache.poll()
            books.mover.on_wait = lambda jobs: None
            books.evict(1_000_000)
            books.let_go(books.alloc(128))  # which writes something else
            books.settle()
            self.through(books, tokens)

    @capability("host_tier")
    def test_a_copy_that_failed_is_none(self) -> None:
        books = self.tier_books()
        tokens = range(LENGTH)
        books.insert(tokens)
        for _ in range(4):
            books.match(tokens)
            for job in list(books.mover.jobs):
                books.finish(job, result=job.size // 2, error="it broke")
            books.poll()
        books.evict(1_000_000)
        self.through(books, tokens)

    @capability("host_tier")
    def test_copies_that_are_under_way_are_not_found(self) -> None:
        books = self.tier_books()
        tokens = range(LENGTH)
        books.insert(tokens)
        books.match(tokens)
        books.match(tokens)
        books.mover.on_wait = lambda jobs: None
        books.evict(1_000_000)
        assert books.match(tokens).host_len == 0
        books.settle()
        self.through(books, tokens)

    @capability("host_tier")
    @sizes
    def test_a_lock_keeps_what_was_found_on_the_host(self, page_size: int) -> None:
        books = self.tier_books(page_size, host_pages=64)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.on_the_host(books, tokens)
        lock = books.lock(tokens)
        self.crowd(books)
        books.evict(1_000_000)
        request = books.load(lock)
        books.loaded(request, True)
        books.unlock(books.keep(request))

    @capability("host_tier")
    def test_what_is_being_loaded_stays_as_it_is(self) -> None:
        """Also where the request is gone before its load is through: a copy may still read these pages."""
        books = self.tier_books(host_pages=64)
        tokens = range(LENGTH)
        self.on_the_host(books, tokens)
        lock = books.lock(tokens)
        request = books.load(lock)
        books.unlock(lock)
        self.crowd(books)  # books look at the pages after every call
        books.loaded(request, True)
        books.let_go(request.slots)
        self.crowd(books)

    @capability("host_tier")
    def test_a_load_that_failed_changes_nothing(self) -> None:
        books = self.tier_books()
        self.on_the_host(books, range(LENGTH))
        lock = books.lock(range(LENGTH))
        for ok in (False, False, True):
            request = books.load(lock)
            books.loaded(request, ok)
            books.let_go(request.slots)
        assert books.match(range(LENGTH)).host_len == lock.host_len
        books.unlock(lock)

    @capability("host_tier")
    def test_that_another_one_loads_is_told(self) -> None:
        books = self.tier_books()
        self.on_the_host(books, range(LENGTH))
        lock = books.lock(range(LENGTH))
        assert not books.match(range(LENGTH)).loading
        version = books.cache.version
        requests = [books.load(lock), books.load(lock)]
        assert books.cache.version > version, "what a match answers has changed"
        for request in requests:
            assert books.match(range(LENGTH)).loading
            version = books.cache.version
            books.loaded(request, False)
            books.let_go(request.slots)
        assert books.cache.version > version, "what a match answers has changed"
        assert not books.match(range(LENGTH)).loading
        books.unlock(lock)

    @capability("host_tier")
    def test_loads_are_refused_where_they_make_no_sense(self) -> None:
        books = self.tier_books()
        self.on_the_host(books, range(LENGTH))
        found = books.match(range(LENGTH))
        slots = books.alloc(found.host_len)
        with pytest.raises(ValueError):
            books.cache.load(found.handle, slots)  # not locked
        lock = books.lock_handle(found.handle, range(LENGTH), "", 0)
        for wrong in (slots[1:], np.append(slots, slots[-1] + 1)):
            with pytest.raises(ValueError):
                books.cache.load(found.handle, wrong)
        load = books.cache.load(found.handle, slots)
        books.cache.loaded(load, True)
        with pytest.raises(ValueError):
            books.cache.loaded(load, True)
        books.unlock(lock)

    @capability("host_tier")
    def test_a_reset_forgets_the_host(self) -> None:
        """Whatever is under way: pages of jobs that go on are not given to others before these end."""
        books = self.tier_books(host_pages=64)
        for turn in range(4):
            self.on_the_host(books, range(LENGTH))
            books.insert(range(500, 500 + LENGTH))
            books.match(range(500, 500 + LENGTH))
            lock = books.lock(range(LENGTH))
            with pytest.raises(RuntimeError):
                books.cache.reset()
            request = books.load(lock)
            books.unlock(lock)
            wait, books.mover.on_wait = books.mover.on_wait, lambda jobs: None
            books.reset()
            assert books.match(range(LENGTH)).host_len == 0
            books.insert(range(600 + turn, 600 + turn + LENGTH))
            books.loaded(request, False)
            books.let_go(request.slots)
            books.mover.on_wait = wait
            books.settle()
            books.reset()

    @capability("host_tier")
    @sizes
    def test_without_host_pages_it_is_a_cache_like_others(self, page_size: int) -> None:
        books = self.tier_books(page_size, host_pages=0)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.used(books, tokens)
        books.evict(LENGTH // 2 * page_size)
        found = books.match(tokens)
        assert (len(found), found.host_len) == (LENGTH // 2 * page_size, 0)
        assert not books.mover.jobs
        books.reset()

    @capability("host_tier")
    def test_after_close_nothing_is_begun(self) -> None:
        books = self.tier_books()
        books.insert(range(LENGTH))
        books.cache.close()
        begun: list[HandJob] = []
        books.mover.on_begin = begun.append
        self.used(books, range(500, 500 + LENGTH))
        books.evict(1_000_000)
        books.settle()
        assert not begun
