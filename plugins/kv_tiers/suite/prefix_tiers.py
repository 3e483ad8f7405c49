"""The suite of PrefixCache: what a cache keeps on the host."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.books import run_of
from pegboard.conformance.prefix_cache.promises import LENGTH, sizes
from pegboard.conformance.suite import capability
from pegboard.plugins.kv_tiers.suite.prefix_tier_suite import TierSuite
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandJob


class HostTierTests(TierSuite):
    """Of caches that declare `host_tier`, and move pages by a PageMover."""

    contract = "prefix_cache"

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
        assert books.match(tokens).promised == 0
        books.settle()
        self.through(books, tokens)

    @capability("host_tier")
    def test_a_reset_forgets_the_host(self) -> None:
        """Whatever is under way: pages of jobs that go on are not given to others before these end."""
        books = self.tier_books(host_pages=64)
        for turn in range(4):
            self.kept_elsewhere(books, range(LENGTH))
            books.insert(range(500, 500 + LENGTH))
            books.match(range(500, 500 + LENGTH))
            lock = books.lock(range(LENGTH))
            with pytest.raises(RuntimeError):
                books.cache.reset()
            request = books.load(lock)
            books.unlock(lock)
            wait, books.mover.on_wait = books.mover.on_wait, lambda jobs: None
            books.reset()
            assert books.match(range(LENGTH)).promised == 0
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
        assert (len(found), found.promised) == (LENGTH // 2 * page_size, 0)
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
