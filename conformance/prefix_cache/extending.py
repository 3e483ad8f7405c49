"""The suite of PrefixCache: a locked path that grows chunk by chunk."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import key_of, run_of
from pegboard.conformance.suite import capability


class ExtendingTests(PrefixSuite):
    """Of caches that declare `reuse`: extend."""

    contract = "prefix_cache"

    @capability("reuse")
    @pages
    def test_a_locked_path_is_extended(self, page_size: int) -> None:
        """The way of a chunked prompt: each chunk goes after the path of those before it."""
        books = self.books(page_size)
        chunk, whole = run_of(1, 2, page_size=page_size), run_of(1, 2, 3, 4, page_size=page_size)
        first = books.lock(chunk)
        second = books.lock_handle(books.extend(first, chunk).handle, chunk, "", len(chunk))
        books.unlock(first)
        tail = [*whole, *[7] * (page_size - 1)]
        result = books.extend(second, tail)
        assert result.taken == 2 * page_size
        third = books.lock_handle(result.handle, whole, "", len(whole))
        books.unlock(second)
        assert books.evict(1000) == 0
        books.unlock(third)
        assert len(books.match(tail)) == 4 * page_size
        assert books.evict(1000) == 4 * page_size

    @capability("reuse")
    @pages
    def test_extending_frees_what_others_brought_meanwhile(self, page_size: int) -> None:
        books = self.books(page_size)
        chunk, whole = run_of(1, 2, page_size=page_size), run_of(1, 2, 3, 4, 5, page_size=page_size)
        lock = books.lock_handle(books.insert(chunk).handle, chunk, "", len(chunk))
        other = books.insert(run_of(1, 2, 3, 4, 6, page_size=page_size))
        freed = books.allocator.taken_back
        result = books.extend(lock, whole)
        assert books.allocator.taken_back == freed + 2
        assert result.slots[: 2 * page_size].tolist() == other.slots[2 * page_size : 4 * page_size].tolist()
        same = books.extend(lock, whole, slots=result.slots)  # what the cache has by now is not freed
        assert books.allocator.taken_back == freed + 2
        assert same.slots.tolist() == result.slots.tolist()

    @capability("reuse")
    @pages
    def test_a_path_that_was_divided_is_extended(self, page_size: int) -> None:
        books = self.books(page_size)
        chunk = run_of(1, 2, 3, page_size=page_size)
        lock = books.lock_handle(books.insert(chunk).handle, chunk, "", len(chunk))
        books.insert(run_of(1, 5, page_size=page_size))
        whole = run_of(1, 2, 3, 4, page_size=page_size)
        result = books.extend(lock, whole)
        books.lock_handle(result.handle, whole, "", len(whole))
        assert books.evict(1000) == page_size
        assert len(books.match(whole)) == 4 * page_size

    @capability("reuse")
    @pages
    def test_extending_keeps_to_its_namespace(self, page_size: int) -> None:
        books = self.books(page_size)
        chunk, whole = run_of(1, page_size=page_size), run_of(1, 2, page_size=page_size)
        for namespace in ("", "a"):
            lock = books.lock_handle(books.insert(chunk, namespace).handle, chunk, namespace, len(chunk))
            books.extend(lock, whole)
            assert len(books.match(whole, namespace)) == 2 * page_size
        assert len(books.match(whole, "b")) == 0
        books.extend(books.lock([], "b"), whole)  # from nothing on it is an insert
        assert len(books.match(whole, "b")) == 2 * page_size
        assert books.cache.cached_tokens == 6 * page_size

    @capability("reuse")
    def test_extending_is_a_change(self) -> None:
        books = self.books()
        lock = books.lock_handle(books.insert([1]).handle, [1], "", 1)
        version = books.cache.version
        books.extend(lock, [1, 2])
        assert books.cache.version > version

    @capability("reuse")
    def test_extending_across_a_gap_raises_and_changes_nothing(self) -> None:
        books = self.books()
        handle = books.insert([1, 2]).handle
        books.lock_handle(handle, [1, 2], "", 2)
        slots = books.alloc(2)
        for tokens in ([1, 2, 3, 4, 5], [1]):
            with pytest.raises(ValueError):
                books.cache.extend(handle, key_of(tokens), slots)
            books.check()
        assert len(books.match([1, 2, 3, 4, 5])) == 2
