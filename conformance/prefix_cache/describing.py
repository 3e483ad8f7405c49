"""The suite of PrefixCache: what a cache tells operators of its runs is what it has."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import Books, run_of
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.prefix_cache import CachedRun

MANY = 100


def told(books: Books, most: int = MANY) -> list[CachedRun]:
    """Return what the cache tells. Skips the test where it tells nothing, which is allowed."""
    version = books.cache.version
    runs = list(books.cache.describe(most))
    books.check()
    assert books.cache.version == version, "to describe a cache must not change it"
    if not runs and books.cache.cached_tokens:
        pytest.skip("this cache tells nothing of its runs")
    return runs


def found_tokens(books: Books) -> int:
    """Return how many tokens all matches have found, whether a run is a node of one page or of many."""
    return sum(run.hits * run.tokens for run in told(books))


class DescribingTests(PrefixSuite):
    """`describe`, of a cache that overrides it."""

    @capability("reuse")
    @pages
    def test_the_runs_told_are_those_that_are_cached(self, page_size: int) -> None:
        books = self.books(page_size)
        assert list(books.cache.describe(MANY)) == []
        books.insert(run_of(1, 2, 3, page_size=page_size))
        books.insert(run_of(1, 2, 9, 9, 9, 9, page_size=page_size))
        lock = books.lock(run_of(1, 2, 3, page_size=page_size))
        runs = told(books)
        assert sum(run.on_device for run in runs) == books.cache.cached_tokens
        assert sum(run.on_device for run in runs if run.locked) == books.cache.locked_tokens
        assert {run.start + run.tokens for run in runs} >= {3 * page_size, 6 * page_size}
        books.unlock(lock)
        books.evict(4 * page_size)
        assert sum(run.on_device for run in told(books)) == books.cache.cached_tokens
        assert not any(run.locked for run in told(books))

    @capability("reuse")
    @pages
    def test_the_largest_runs_come_first_and_no_more_than_asked_for(self, page_size: int) -> None:
        books = self.books(page_size)
        for first, length in ((1, 2), (2, 7), (3, 4)):
            books.insert(run_of(*[first] * length, page_size=page_size))
        sizes = [run.tokens for run in told(books)]
        assert sizes == sorted(sizes, reverse=True)
        assert [run.tokens for run in told(books, 1)] == sizes[:1]

    @capability("reuse")
    @pages
    def test_a_run_names_the_one_before_it(self, page_size: int) -> None:
        books = self.books(page_size)
        books.insert(run_of(1, 2, 3, 4, page_size=page_size))
        books.insert(run_of(1, 2, 5, page_size=page_size))
        runs = told(books)
        for place, run in enumerate(runs):
            if run.start == 0:
                assert run.above == -1
            else:
                before = runs[run.above]
                assert run.above not in (-1, place)
                assert before.start + before.tokens <= run.start

    @capability("reuse")
    @pages
    def test_matches_are_counted(self, page_size: int) -> None:
        books = self.books(page_size)
        books.insert(run_of(1, 2, page_size=page_size))
        books.insert(run_of(7, 8, 9, page_size=page_size))
        before = found_tokens(books)
        for _ in range(3):
            books.match(run_of(1, 2, page_size=page_size))
        assert found_tokens(books) == before + 3 * 2 * page_size, "only what a match found is hit"
