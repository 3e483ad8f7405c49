"""The suite of PrefixCache: what is locked stays, what is evicted comes back, and which side owns which array."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import key_of, run_of
from pegboard.conformance.suite import capability


class KeepingTests(PrefixSuite):
    """Of caches that declare `reuse`: locks, eviction, reset and the version."""

    contract = "prefix_cache"

    @capability("reuse")
    @pages
    def test_a_lock_keeps_its_path(self, page_size: int) -> None:
        books = self.books(page_size)
        kept, other = run_of(1, 2, 3, page_size=page_size), run_of(1, 4, page_size=page_size)
        books.insert(kept)
        books.insert(other)
        lock = books.lock(kept)
        assert books.evict(1000) == page_size
        assert len(books.match(kept)) == 3 * page_size
        assert len(books.match(other)) == page_size
        books.unlock(lock)
        assert books.evict(1000) == 3 * page_size

    @capability("reuse")
    @pages
    def test_a_lock_on_a_part_keeps_that_part(self, page_size: int) -> None:
        books = self.books(page_size)
        books.insert(run_of(1, 2, 3, page_size=page_size))
        books.lock(run_of(1, 2, page_size=page_size))
        assert books.evict(1000) == page_size
        assert len(books.match(run_of(1, 2, 3, page_size=page_size))) == 2 * page_size

    @capability("reuse")
    def test_locks_count(self) -> None:
        books = self.books()
        handle = books.insert([1, 2, 3]).handle
        locks = [books.lock_handle(handle, [1, 2, 3], "", 3) for _ in range(2)]
        locks.append(books.lock([1, 2]))
        for evicted in (0, 1, 2):
            books.unlock(locks.pop(0))
            assert books.evict(1000) == evicted

    @capability("reuse")
    def test_unlocking_more_often_than_locking_raises(self) -> None:
        books = self.books()
        lock = books.lock_handle(books.insert([1, 2]).handle, [1, 2], "", 2)
        books.unlock(lock)
        with pytest.raises(ValueError):
            books.cache.unlock(lock.handle)
        books.check()
        assert books.evict(2) == 2

    @capability("reuse")
    @pages
    def test_a_lock_survives_a_split(self, page_size: int) -> None:
        """A lock taken before another sequence divides its path still holds, and lets go of, the whole path."""
        books = self.books(page_size)
        tokens = run_of(1, 2, 3, 4, page_size=page_size)
        lock = books.lock_handle(books.insert(tokens).handle, tokens, "", len(tokens))
        books.insert(run_of(1, 2, 5, page_size=page_size))
        inner = books.lock(run_of(1, page_size=page_size))
        assert books.cache.locked_tokens == 4 * page_size
        assert books.evict(1000) == page_size
        assert len(books.match(tokens)) == 4 * page_size
        books.unlock(lock)
        assert books.cache.locked_tokens == page_size
        books.unlock(inner)
        assert books.evict(1000) == 4 * page_size

    @capability("reuse")
    @pages
    def test_a_handle_survives_a_split(self, page_size: int) -> None:
        """A handle that was not locked yet when its path was divided covers the whole path when it is."""
        books = self.books(page_size)
        tokens = run_of(1, 2, 3, 4, page_size=page_size)
        handle = books.insert(tokens).handle
        books.insert(run_of(1, 5, page_size=page_size))
        books.match(run_of(1, 2, 3, page_size=page_size))
        books.lock_handle(handle, tokens, "", len(tokens))
        assert books.evict(1000) == page_size
        assert len(books.match(tokens)) == 4 * page_size

    @capability("reuse")
    def test_the_handle_of_an_insert_covers_what_was_there_before(self) -> None:
        books = self.books()
        books.insert([1, 2, 3])
        result = books.insert([1, 2, 3, 4])
        books.lock_handle(result.handle, [1, 2, 3, 4], "", 4)
        assert books.evict(1000) == 0

    @capability("reuse")
    def test_the_handle_of_an_insert_covers_no_more_than_was_inserted(self) -> None:
        books = self.books()
        books.insert([1, 2, 3])
        result = books.insert([1, 2])
        books.lock_handle(result.handle, [1, 2], "", 2)
        assert books.evict(1000) == 1

    @capability("reuse")
    def test_an_insert_locks_nothing(self) -> None:
        books = self.books()
        books.insert([1, 2, 3])
        assert books.cache.locked_tokens == 0
        assert books.evict(3) == 3

    @capability("reuse")
    @pages
    def test_ends_go_before_what_they_continue(self, page_size: int) -> None:
        books = self.books(page_size)
        for chars in ((1,), (1, 2), (1, 2, 3), (1, 2, 4), (5, 6)):
            books.insert(run_of(*chars, page_size=page_size))
        books.match(run_of(1, 2, 4, page_size=page_size))
        books.match(run_of(5, page_size=page_size))
        while books.known:  # evict() checks the order of what is gone
            assert books.evict(1) >= page_size

    @capability("reuse")
    @pages
    def test_evict_gives_whole_pages_and_tells_how_much(self, page_size: int) -> None:
        books = self.books(page_size)
        for char in range(8):
            books.insert(run_of(char, page_size=page_size))
        assert books.evict(0) == 0
        assert books.evict(1) == page_size
        assert books.evict(2 * page_size + 1) == 3 * page_size
        assert books.evict(1000) == 4 * page_size
        assert books.evict(1000) == 0
        assert books.allocator.free_pages == books.allocator.num_pages

    @capability("reuse")
    def test_reset_frees_everything(self) -> None:
        books = self.books()
        books.insert([1, 2, 3])
        books.insert([1, 4], "other")
        lock = books.lock([1, 2])
        books.unlock(lock)
        books.reset()
        assert books.allocator.free_pages == books.allocator.num_pages
        assert len(books.match([1, 2, 3])) == 0
        books.insert([1, 2, 3])

    @capability("reuse")
    def test_reset_refuses_while_something_is_locked(self) -> None:
        books = self.books()
        books.insert([1, 2, 3])
        books.insert([4])
        lock = books.lock([1])
        with pytest.raises(RuntimeError):
            books.cache.reset()
        books.check()
        assert len(books.match([1, 2, 3])) == 3
        books.unlock(lock)
        books.reset()

    @capability("reuse")
    def test_the_version_grows_with_every_change(self) -> None:
        books = self.books()
        versions = [books.cache.version]
        for tokens in ([1, 2], [1, 2, 3], [1, 4]):
            books.insert(tokens)
            versions.append(books.cache.version)
        books.evict(1)
        versions.append(books.cache.version)
        books.reset()
        versions.append(books.cache.version)
        assert versions == sorted(set(versions)), f"versions after each change: {versions}"

    @capability("reuse")
    def test_the_caller_may_overwrite_its_arrays(self) -> None:
        """A request's tokens and row are views of buffers that are used again."""
        books = self.books()
        tokens = [1, 2, 3, 4]
        key, slots = key_of(tokens), books.alloc(4)
        wanted = slots.tolist()
        books.cache.insert(key, slots)
        books.held.clear()
        books.known = {("", tuple(tokens[: n + 1])): wanted[n] for n in range(4)}
        key.tokens[:] = 9
        slots[:] = 0
        assert books.match(tokens).slots.tolist() == wanted
        assert len(books.match([9, 9, 9, 9])) == 0

    @capability("reuse")
    def test_results_are_copies(self) -> None:
        books = self.books()
        for wanted in (2, 4):  # a whole entry, and one that is shared
            books.insert([1, 2, 3, 4][:wanted]).slots[:] = -1
            books.match([1, 2, 3, 4]).slots[:] = -1
            books.insert([1, 2, 3, 4][:wanted]).slots[:] = -1
            assert len(books.match([1, 2, 3, 4])) == wanted

    @capability("reuse")
    def test_priorities_are_accepted(self) -> None:
        books = self.books()
        for priority in (5, -3, 0):
            books.insert([1, 2, priority + 10], priority=priority)
        assert books.evict(1000) == 5
