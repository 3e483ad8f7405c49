"""The suite of PrefixCache: what a cache refuses, with nothing changed, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import Books, key_of, run_of
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.prefix_cache import CacheHandle


def _refused(books: Books, error: type[Exception], why: str, call: Callable[..., object], *given: object) -> None:
    """`call(*given)` raises `error`, and nothing is different after it."""
    __tracebackhide__ = True
    version, owned = books.cache.version, set(books.allocator.held)
    try:
        call(*given)
    except error:
        assert books.allocator.held == owned, f"{why} raised {error.__name__}, but freed pages before that"
        assert books.cache.version == version, f"{why} raised {error.__name__}, but changed the cache before that"
        books.check()
        return
    pytest.fail(f"{why} must raise {error.__name__}, and is accepted", pytrace=False)


class RefusalTests(PrefixSuite):
    """Of caches that declare `reuse`."""

    contract = "prefix_cache"

    @capability("reuse")
    @pages
    def test_what_was_evicted_cannot_be_locked(self, page_size: int) -> None:
        """The slots that were matched are another request's by then."""
        tokens = run_of(1, 2, 3, page_size=page_size)

        def stale(books: Books, handles: list[CacheHandle], after: str) -> None:
            for handle in handles:
                _refused(books, ValueError, f"to lock a handle {after}", books.cache.lock, handle)
                _refused(books, ValueError, "to unlock what could not be locked", books.cache.unlock, handle)

        books = self.books(page_size)
        handles = [books.insert(tokens).handle, books.match(tokens).handle]
        assert books.evict(1) == page_size
        stale(books, handles, "after its last page was evicted")
        books.evict(1000)
        stale(books, handles, "after its path was evicted")
        books.alloc(page_size)  # so that what is inserted again stands elsewhere
        handles.append(books.insert(tokens).handle)
        stale(books, handles[:2], "after its path was evicted, and others inserted the same tokens")
        books.reset()
        stale(books, handles, "after a reset")
        books.unlock(books.lock(tokens))

    @capability("reuse")
    @pages
    def test_reset_leaves_the_callers_pages_alone(self, page_size: int) -> None:
        """Requests run on with pages that they have not inserted yet."""
        books = self.books(page_size)
        books.insert(run_of(1, 2, page_size=page_size))
        books.insert([*run_of(3, page_size=page_size), *[9] * (page_size - 1)])  # with a tail that stays the caller's
        own = books.alloc(2 * page_size)
        lock = books.lock([8])
        books.reset()
        books.unlock(lock)
        books.insert(run_of(1, 5, page_size=page_size), slots=own)
        assert books.evict(1000) == 2 * page_size

    @capability("reuse")
    @pages
    def test_a_refused_reset_changes_nothing(self, page_size: int) -> None:
        books = self.books(page_size)
        inserted = [(run_of(*chars, page_size=page_size), space) for chars in ((1, 2), (1, 3)) for space in ("", "a")]
        for tokens, space in inserted:
            books.insert(tokens, space)
        start, longer = run_of(1, page_size=page_size), inserted[0][0]
        books.lock(start, "a")
        extended = books.extend(books.lock(start), longer)
        books.lock_handle(extended.handle, longer, "", len(longer))
        while books.locks:
            _refused(books, RuntimeError, f"reset() while {len(books.locks)} handles are locked", books.cache.reset)
            for tokens, space in inserted:
                books.match(tokens, space)
            books.unlock(books.locks[-1])
        books.reset()
        assert books.allocator.free_pages == books.allocator.num_pages

    @capability("reuse")
    def test_each_handle_counts_its_own_locks(self) -> None:
        """Two requests with the same prompt: one that lets go twice must not take the other one's lock."""
        books = self.books()
        first = books.lock_handle(books.insert([1, 2]).handle, [1, 2], "", 2)
        second = books.match([1, 2]).handle
        _refused(books, ValueError, "to unlock a handle that is not locked itself", books.cache.unlock, second)
        assert books.evict(2) == 0
        books.unlock(first)
        _refused(books, ValueError, "to unlock a handle twice", books.cache.unlock, first.handle)

    @capability("reuse")
    @pages
    def test_a_page_in_two_places_is_refused(self, page_size: int) -> None:
        """It would be freed twice, and hold the KV of one of them only."""
        books = self.books(page_size)
        one, other = run_of(1, 2, page_size=page_size), run_of(3, 4, page_size=page_size)
        taken, others = books.insert(one).slots, books.insert(other).slots
        new = books.alloc(page_size)
        start = np.concatenate((new, taken[page_size:]))
        for tokens, slots, what in (
            (run_of(5, 6, page_size=page_size), taken, "new tokens"),
            (run_of(5, 2, page_size=page_size), start, "the same tokens after others"),
            (one, others, "tokens that the cache has elsewhere, which would free them as duplicates"),
        ):
            why = f"to insert pages that are cached for other tokens, with {what},"
            _refused(books, ValueError, why, books.cache.insert, key_of(tokens), slots)
        lock = books.lock(one)
        longer = [*one, *run_of(7, page_size=page_size)]
        why = "to extend a path by a page that is cached for other tokens"
        _refused(books, ValueError, why, books.cache.extend, lock.handle, key_of(longer), others[:page_size])
        books.match(one)
        books.match(other)

    @capability("reuse")
    @pages
    def test_slots_that_fill_no_pages_are_refused(self, page_size: int) -> None:
        if page_size == 1:
            pytest.skip("every slot is a page of its own")
        books = self.books(page_size)
        tokens = run_of(1, 2, page_size=page_size)
        slots = books.alloc(3 * page_size)
        wrong = {
            "that begin within a page": slots[1 : 1 + 2 * page_size],
            "that run backwards": slots[: 2 * page_size][::-1].copy(),
            "that leave one out": np.concatenate((slots[: page_size - 1], slots[page_size : 2 * page_size + 1])),
        }
        for what, given in wrong.items():
            _refused(books, ValueError, f"to insert slots {what}", books.cache.insert, key_of(tokens), given)

    @capability("reuse")
    @pages
    def test_slots_outside_of_the_pool_are_refused(self, page_size: int) -> None:
        """Page 0 is the allocator's own, and beyond the last page there is no KV."""
        books = self.books(page_size, num_pages=16)
        run = np.arange(page_size, dtype=np.int64)
        for what, page in (("of page 0", 0), ("beyond the last page", 17), ("that are negative", -1)):
            why = f"to insert slots {what}"
            _refused(books, ValueError, why, books.cache.insert, key_of(range(page_size)), page * page_size + run)

    @capability("reuse")
    def test_a_handle_of_something_else_is_refused(self) -> None:
        """Taken without an error, it would leave a request's pages unlocked."""
        books = self.books()
        books.insert([1, 2])
        for name, call in (("lock", books.cache.lock), ("unlock", books.cache.unlock)):
            _refused(books, Exception, f"to {name} an object that is not a handle of this cache", call, object())
        assert len(books.match([1, 2])) == 2

    @capability("reuse")
    def test_what_extended_a_path_may_be_overwritten(self) -> None:
        """The arrays of `extend` are the caller's buffers too."""
        books = self.books()
        lock = books.lock_handle(books.insert([1, 2]).handle, [1, 2], "", 2)
        key, slots = key_of([1, 2, 3, 4]), books.alloc(2)
        wanted = slots.tolist()
        result = books.cache.extend(lock.handle, key, slots)
        books.held.difference_update(wanted)
        books.known |= {("", (1, 2, 3)): wanted[0], ("", (1, 2, 3, 4)): wanted[1]}
        key.tokens[:] = 9
        slots[:] = 0
        result.slots[:] = 0
        assert books.match([1, 2, 3, 4]).slots.tolist()[2:] == wanted
        assert len(books.match([9, 9, 9, 9])) == 0

    @capability("reuse")
    def test_what_changes_no_answer_leaves_the_version(self) -> None:
        """Policies match thousands of requests anew when it has grown."""
        books = self.books()
        books.insert([1, 2, 3])
        steps: dict[str, Callable[[], object]] = {
            "match": lambda: books.match([1, 2]),
            "match of what is not there": lambda: books.match([7], "other"),
            "lock": lambda: books.lock([1, 2]),
            "insert of what is cached": lambda: books.insert([1, 2, 3]),
            "evict where all is locked": lambda: (books.lock([1, 2, 3]), books.evict(5)),
            "unlock": lambda: books.unlock(books.locks[0]),
        }
        for name, step in steps.items():
            version = books.cache.version
            step()
            assert books.cache.version == version, f"{name} changes nothing that match could answer, but the version"
