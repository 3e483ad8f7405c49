"""What the radix cache does beyond its contract."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from pegboard.conformance.prefix_cache.books import Books, key_of
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions


def books_of(page_size: int = 1) -> Books:
    return Books(lambda ctx: RadixCache(RadixOptions(), ctx), 16, page_size)


def cache_of(books: Books) -> RadixCache:
    assert isinstance(books.cache, RadixCache)
    return books.cache


def test_refusals_say_what_is_wrong() -> None:
    """What is refused is the suite's business; here is what a person reads."""
    books = books_of()
    handle = books.insert([1, 2]).handle
    slots = books.match([1, 2]).slots
    with pytest.raises(TypeError, match="not a handle of a radix cache"):
        books.cache.lock(object())
    with pytest.raises(ValueError, match="other tokens"):
        books.cache.insert(key_of([3, 4]), slots)
    with pytest.raises(ValueError, match="slots outside of pages 1 to 16"):
        books.cache.insert(key_of([3]), np.array([17]))
    with pytest.raises(ValueError, match="not locked"):
        books.cache.unlock(handle)
    books.evict(1)
    with pytest.raises(ValueError, match="match it again"):
        books.cache.lock(handle)


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


def test_extending_does_not_look_at_what_is_locked() -> None:
    """The caller vouches for the locked part, so a key that differs there extends the same path."""
    books = Books(lambda ctx: RadixCache(RadixOptions(), ctx), 200)
    tokens = list(range(100))
    lock = books.lock_handle(books.insert(tokens).handle, tokens, "", 100)
    books.insert([*range(50), 7])  # divides the path
    new = books.alloc(10)
    result = books.cache.extend(lock.handle, key_of([*[5000] * 100, *range(100, 110)]), new)
    assert result.taken == 10
    assert books.cache.match(key_of(range(110))).slots.tolist()[100:] == new.tolist()
    assert len(books.cache.match(key_of([5000]))) == 0


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
            RadixOptions(**wrong)


def test_no_torch_is_imported() -> None:
    modules = ("cache_radix.cache", "cache_radix.options", "cache_block.cache", "cache_none.cache")
    modules += ("memory_paged.allocators",)  # type: ignore[assignment]
    imports = "; ".join(f"import pegboard.plugins.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"{imports}; import sys; assert 'torch' not in sys.modules"], check=True)
