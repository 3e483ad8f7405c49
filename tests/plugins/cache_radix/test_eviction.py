"""The exact order of each policy, and that a victim is found without a look at the others."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.prefix_cache.books import Books
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions
from pegboard.toolkit.cache.eviction import KEYS


def books_of(eviction: str, num_pages: int = 16, page_size: int = 1, **options: Any) -> Books:
    return Books(lambda ctx: RadixCache(RadixOptions(eviction=eviction, **options), ctx), num_pages, page_size)  # type: ignore[arg-type]


def order(books: Books) -> list[tuple[int, ...]]:
    """What goes, page by page."""
    gone = []
    while books.known:
        before = set(books.known)
        assert books.evict(1) == books.page_size
        gone += [tokens for _, tokens in before - set(books.known)]
    return gone


def test_lru_goes_by_the_last_use() -> None:
    books = books_of("lru")
    for token in (1, 2, 3, 4):
        books.insert([token])
    books.match([1])
    books.insert([2])  # inserting it again is a use too
    assert order(books) == [(3,), (4,), (1,), (2,)]


def test_a_match_uses_only_what_it_covers() -> None:
    books = books_of("lru")
    books.insert([1, 2])
    books.insert([3])
    books.match([1])
    assert order(books) == [(1, 2), (3,), (1,)]


def test_a_leaf_shrinks_from_its_end() -> None:
    books = books_of("lru")
    books.insert([1, 2, 3])
    books.insert([4])
    assert order(books) == [(1, 2, 3), (1, 2), (1,), (4,)]


def test_lfu_goes_by_the_number_of_matches_then_by_the_last_use() -> None:
    books = books_of("lfu")
    for token in (1, 2, 3, 4):
        books.insert([token])
    for token in (1, 1, 4, 2):
        books.match([token])
    for _ in range(5):
        books.insert([3])  # no match: whoever inserts it has found it before, or computed it
    assert order(books) == [(3,), (4,), (2,), (1,)]


def test_fifo_goes_by_age_alone() -> None:
    books = books_of("fifo")
    for token in (1, 2, 3):
        books.insert([token])
    books.match([1])
    books.insert([1, 5])
    assert order(books) == [(2,), (3,), (1, 5), (1,)]


def test_priority_goes_from_low_to_high_then_by_the_last_use() -> None:
    books = books_of("priority")
    for token, priority in ((1, 2), (2, 0), (3, -1), (4, 0)):
        books.insert([token], priority=priority)
    books.match([2])
    assert order(books) == [(3,), (4,), (2,), (1,)]


def test_a_more_urgent_request_raises_the_priority_of_what_it_shares() -> None:
    books = books_of("priority")
    books.insert([1, 2], priority=0)
    books.insert([3], priority=1)
    books.insert([1, 4], priority=2)
    assert order(books) == [(1, 2), (3,), (1, 4), (1,)]


def test_slru_keeps_what_was_found_again() -> None:
    books = books_of("slru", num_pages=8, protected_share=0.5)
    for token in (1, 2, 3, 4):
        books.insert([token])
    books.match([1])
    books.match([2])
    for token in (3, 4):
        books.insert([token])
    assert order(books) == [(3,), (4,), (1,), (2,)]


def test_slru_takes_protection_from_the_least_recent() -> None:
    books = books_of("slru", num_pages=8, protected_share=0.25)
    for token in (1, 2, 3, 4):
        books.insert([token])
    for token in (1, 2, 1, 3):  # 2 loses its protection to 3, and becomes the most recent of the others
        books.match([token])
    assert order(books) == [(4,), (2,), (1,), (3,)]


def test_slru_does_not_give_everything_to_one_long_prefix() -> None:
    books = books_of("slru", num_pages=8, protected_share=0.25)
    books.insert([1])
    books.insert([2, 3, 4])
    books.match([1])
    books.match([2, 3, 4])
    assert order(books)[-1] == (1,)


def test_slru_follows_splits_and_shrinking() -> None:
    books = books_of("slru", num_pages=8, protected_share=0.5)
    books.insert([1, 2, 3, 4])
    books.match([1, 2, 3, 4])
    books.match([1, 2])
    books.insert([5])
    assert order(books) == [(5,), (1, 2, 3, 4), (1, 2, 3), (1, 2), (1,)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_slru_with_an_extreme_share(share: float) -> None:
    books = books_of("slru", protected_share=share)
    for token in (1, 2):
        books.insert([token])
    books.match([1])
    assert order(books) == [(2,), (1,)]


@pytest.mark.parametrize("eviction", KEYS)
def test_only_what_can_be_evicted_is_a_candidate(eviction: str) -> None:
    books = books_of(eviction, num_pages=64, protected_share=0.125)
    cache = books.cache
    assert isinstance(cache, RadixCache)
    for token in range(8):
        books.insert([token, token])
    for turn in range(100):  # Books checks the heap after every call
        books.unlock(books.lock([turn % 8, turn % 8]))
    assert len(cache._victims) == 8
    locks = [books.lock([token, token]) for token in range(3)]
    books.extend(locks[0], [0, 0, 5])
    books.insert([3, 3, 5])
    assert len(cache._victims) == 6  # 0 0 is not a leaf any more, but 0 0 5 is one
    for lock in locks:
        books.unlock(lock)
    assert len(cache._victims) == 8


def test_check_finds_a_heap_out_of_order() -> None:
    books = books_of("lru")
    for token in (1, 2, 3):
        books.insert([token])
    cache = books.cache
    assert isinstance(cache, RadixCache)
    cache._victims._items[0].last_access = 99
    with pytest.raises(AssertionError, match="old key"):
        cache.check()
