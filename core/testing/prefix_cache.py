"""The conformance suite of PrefixCache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from pegboard.core.interfaces.keys import PrefixKey, PrefixMemo
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.testing.fakes import CountingAllocator
from pegboard.core.testing.prefix_books import Books, key_of, run_of
from pegboard.core.testing.prefix_machine import CacheMachine
from pegboard.core.testing.properties import properties
from pegboard.core.testing.suite import ContractSuite, capability, lacks

PAGE_SIZES = [1, 4, 16]
pages = pytest.mark.parametrize("page_size", PAGE_SIZES)


class PrefixCacheContract(ContractSuite):
    """What is inserted is found, what is locked stays, what goes comes back, and every page has one owner.

    The tests call the cache through `Books`, which checks all owners and counters after every call.
    """

    contract = "prefix_cache"

    def books(self, page_size: int = 1, num_pages: int = 64) -> Books:
        return Books(self.build, num_pages, page_size)

    # What every cache does, one that keeps nothing included.

    @pages
    def test_a_miss_is_empty(self, page_size: int) -> None:
        books = self.books(page_size)
        for tokens in ([], [1], run_of(1, 2, page_size=page_size)):
            found = books.match(tokens)
            assert (len(found), found.host_len) == (0, 0)

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
    def test_an_inserted_prefix_is_found(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = run_of(1, 2, 3, page_size=page_size)
        slots = books.alloc(len(tokens))
        books.insert(tokens, slots=slots)
        assert books.match(tokens).slots.tolist() == slots.tolist()
        assert books.match([*tokens, 7, 7]).slots.tolist() == slots.tolist()

    @capability("reuse")
    @pages
    def test_the_longest_common_prefix_is_found(self, page_size: int) -> None:
        books = self.books(page_size)
        books.insert(run_of(1, 2, 3, 4, page_size=page_size))
        books.insert(run_of(1, 2, 5, page_size=page_size))
        for chars, length in (((1, 2, 3, 9), 3), ((1, 2, 9), 2), ((1, 2, 5, 3), 3), ((1,), 1), ((2, 1), 0)):
            assert len(books.match(run_of(*chars, page_size=page_size))) == length * page_size

    @capability("reuse")
    @pages
    def test_a_look_tells_what_a_match_finds(self, page_size: int) -> None:
        """The same length, whether or not a match has been there before; and it locks and changes nothing."""
        books = self.books(page_size)
        tokens = run_of(1, 2, 3, 4, page_size=page_size)
        books.insert(tokens)
        asked = [tokens, tokens[:-1], [*tokens, 9], [*tokens[:page_size], 9, 9], [9, *tokens[1:]], tokens[:1], []]
        keys = [PrefixKey(np.array(one, np.int64)) for one in asked]
        version = books.cache.version
        looks = [books.cache.matched_length(key) for key in keys]
        assert (books.cache.version, books.cache.locked_tokens) == (version, 0)
        assert looks == [len(books.cache.match(key)) for key in keys]
        assert looks == [books.cache.matched_length(key) for key in keys]

    @capability("reuse")
    @pages
    def test_only_whole_pages_are_found(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = run_of(1, 2, page_size=page_size)
        books.insert(tokens)
        assert len(books.match(tokens[:-1])) == page_size
        assert len(books.match([*tokens[:-1], 9])) == page_size
        assert len(books.match([9, *tokens[1:]])) == 0

    @capability("reuse")
    @pages
    def test_a_partial_tail_stays_with_the_caller(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = [*run_of(1, 2, page_size=page_size), *[3] * (page_size - 1)]
        slots = books.alloc(len(tokens))
        result = books.insert(tokens, slots=slots)
        assert result.taken == 2 * page_size
        assert set((slots[result.taken :] // page_size).tolist()) == books.held
        assert len(books.match([*tokens, 3])) == 2 * page_size

    @capability("reuse")
    @pages
    def test_namespaces_are_separate(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = run_of(1, 2, page_size=page_size)
        for namespace in ("a", "b", ""):
            assert len(books.match(tokens, namespace)) == 0
            books.insert(tokens, namespace)
        assert books.cache.cached_tokens == 6 * page_size

    @capability("reuse")
    @pages
    def test_diverging_sequences_share_their_beginning(self, page_size: int) -> None:
        books = self.books(page_size)
        first = books.insert(run_of(1, 2, 3, page_size=page_size))
        second = books.insert(run_of(1, 2, 4, page_size=page_size))
        assert first.slots[: 2 * page_size].tolist() == second.slots[: 2 * page_size].tolist()
        assert books.cache.cached_tokens == 4 * page_size

    @capability("reuse")
    @pages
    def test_duplicates_are_freed_and_answered_with_the_cached_slots(self, page_size: int) -> None:
        books = self.books(page_size)
        tokens = run_of(1, 2, page_size=page_size)
        first = books.insert(tokens)
        before = books.allocator.free_pages
        again = books.insert(tokens)
        assert again.slots.tolist() == first.slots.tolist()
        assert again.taken == 2 * page_size
        assert books.allocator.free_pages == before
        assert books.allocator.taken_back == 2

    @capability("reuse")
    @pages
    def test_the_same_pages_are_not_freed(self, page_size: int) -> None:
        """The way of a chunked prompt: what was inserted before comes again, with the next chunk behind it."""
        books = self.books(page_size)
        chunk = books.insert(run_of(1, 2, page_size=page_size))
        slots = np.concatenate((chunk.slots, books.alloc(page_size)))
        books.insert(run_of(1, 2, 3, page_size=page_size), slots=slots)
        assert books.allocator.taken_back == 0
        books.insert(run_of(1, 2, 3, page_size=page_size), slots=slots)
        assert books.allocator.taken_back == 0
        assert books.cache.cached_tokens == 3 * page_size

    @capability("reuse")
    @pages
    def test_only_the_duplicates_among_the_pages_are_freed(self, page_size: int) -> None:
        """A request matched one page and computed the next while another one inserted the same."""
        books = self.books(page_size)
        start = books.insert(run_of(1, page_size=page_size))
        books.insert(run_of(1, 2, page_size=page_size))
        assert books.allocator.taken_back == 1
        slots = np.concatenate((start.slots, books.alloc(2 * page_size)))
        result = books.insert(run_of(1, 2, 3, page_size=page_size), slots=slots)
        assert books.allocator.taken_back == 2
        assert result.slots[2 * page_size :].tolist() == slots[2 * page_size :].tolist()

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

    @capability("reuse")
    @pages
    def test_a_locked_path_is_extended(self, page_size: int) -> None:
        """The way of a chunked prompt: each chunk goes behind the path of those before it."""
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
