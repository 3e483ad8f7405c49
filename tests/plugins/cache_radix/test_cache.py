"""What the radix cache does beyond its contract."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from pegboard.conformance.prefix_books import Books, key_of
from pegboard.core.toolkit.cache.radix_tree import RadixTree
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions


def books_of(page_size: int = 1) -> Books:
    return Books(lambda ctx: RadixCache(RadixOptions(), ctx), 16, page_size)


def cache_of(books: Books) -> RadixCache:
    assert isinstance(books.cache, RadixCache)
    return books.cache


def test_a_stale_handle_is_refused() -> None:
    books = books_of()
    handle = books.insert([1, 2, 3]).handle
    books.evict(1)
    with pytest.raises(ValueError, match="match it again"):
        books.cache.lock(handle)
    books.insert([1, 2, 3])  # at the same depth, but in another node
    with pytest.raises(ValueError, match="match it again"):
        books.cache.lock(handle)
    gone = books.match([1, 2]).handle
    books.evict(3)
    with pytest.raises(ValueError, match="match it again"):
        books.cache.lock(gone)
    books.check()


def test_a_handle_of_something_else_is_refused() -> None:
    books = books_of()
    for call in (books.cache.lock, books.cache.unlock):
        with pytest.raises(TypeError, match="no handle of a radix cache"):
            call(object())  # type: ignore[arg-type]


def test_locks_are_of_a_handle() -> None:
    """Whoever unlocks a handle that it did not lock is told so, even where another one holds the same path."""
    books = books_of()
    books.insert([1, 2])
    books.lock([1, 2])
    with pytest.raises(ValueError, match="not locked"):
        books.cache.unlock(books.match([1, 2]).handle)


def test_a_page_cannot_be_inserted_for_two_prefixes() -> None:
    books = books_of()
    slots = books.insert([1, 2]).slots
    for tokens in ([3, 4], [1, 3]):
        with pytest.raises(ValueError, match="other tokens"):
            books.cache.insert(key_of(tokens), slots)
        books.check()
    with pytest.raises(ValueError, match="other tokens"):
        books.cache.insert(key_of([1, 2]), slots[::-1])
    books.check()


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [68, 69, 70, 71], [4, 5, 6, 8], [5, 6, 7, 8], [-4, -3, -2, -1]])
def test_slots_that_are_no_pages_are_refused(slots: list[int]) -> None:
    books = books_of(4)
    with pytest.raises(ValueError, match="slots"):
        books.cache.insert(key_of([1, 2, 3, 4]), np.array(slots))
    books.check()


def test_a_match_splits_where_it_ends_and_changes_no_version() -> None:
    books = books_of()
    books.insert([1, 2, 3])
    version = books.cache.version
    books.match([1, 2])
    assert cache_of(books)._tree.num_nodes == 2
    assert books.cache.version == version


def test_a_path_is_extended_by_what_fits_and_while_it_is_locked() -> None:
    books = books_of()
    handle = books.insert([1, 2]).handle
    slots = books.alloc(1)
    with pytest.raises(ValueError, match="not locked"):
        books.cache.extend(handle, key_of([1, 2, 3]), slots)
    books.lock_handle(handle, [1, 2], "", 2)
    for tokens in ([1], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="a path of 2 and slots"):
            books.cache.extend(handle, key_of(tokens), slots)
    with pytest.raises(ValueError, match="other tokens"):
        books.cache.extend(handle, key_of([1, 2, 3]), books.cache.match(key_of([1])).slots)
    books.check()


def test_extending_does_not_look_at_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(lambda ctx: RadixCache(RadixOptions(), ctx), 200)
    lock = books.lock_handle(books.insert(list(range(100))).handle, list(range(100)), "", 100)
    books.insert([*range(50), 7])  # divides the path
    compared = []
    common = RadixTree._common
    monkeypatch.setattr(
        RadixTree, "_common", lambda self, run, tokens: compared.append(len(tokens)) or common(self, run, tokens)
    )
    books.cache.extend(lock.handle, key_of(range(110)), books.alloc(10))
    assert compared == []


def test_a_namespace_leaves_nothing_behind() -> None:
    books = books_of()
    books.insert([1, 2], "salt")
    books.evict(2)
    assert cache_of(books)._tree.roots() == {}


def test_a_row_of_small_integers_is_taken() -> None:
    books = books_of(2)
    slots = books.alloc(4)
    result = books.insert([1, 2, 3, 4], slots=slots.astype(np.int32))
    assert result.slots.dtype == np.int64


def test_check_finds_wrong_books() -> None:
    books = books_of()
    books.insert([1, 2])
    cache = cache_of(books)
    cache._locked += 1
    with pytest.raises(AssertionError, match="0 tokens are locked, but 1 counted"):
        cache.check()
    cache._locked -= 1
    cache._owned[9] = True
    with pytest.raises(AssertionError, match="the pages of the tree"):
        cache.check()


def test_options_are_checked() -> None:
    for wrong in ({"eviction": "mru"}, {"protected_share": 1.5}, {"evict": "lru"}):
        with pytest.raises(ValidationError):
            RadixOptions(**wrong)  # type: ignore[arg-type]


def test_no_torch_is_imported() -> None:
    modules = ("cache_radix.cache", "cache_radix.options", "cache_block.cache", "cache_none.cache")
    modules += ("memory_paged.allocators",)  # type: ignore[assignment]
    imports = "; ".join(f"import pegboard.plugins.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"{imports}; import sys; assert 'torch' not in sys.modules"], check=True)
