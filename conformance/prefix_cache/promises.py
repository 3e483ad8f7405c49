"""The suite of PrefixCache: prefixes that it keeps elsewhere, promises, and has loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_cache.base import PrefixSuite
from pegboard.conformance.prefix_cache.books import key_of, run_of
from pegboard.conformance.prefix_cache.promise_books import Elsewhere, PromiseBooks, Request
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext

sizes = pytest.mark.parametrize("page_size", [1, 16])
LENGTH = 40
"""Pages of a prompt, so many that any cache finds them worth a load."""


class PromiseTests(PrefixSuite):
    """Of caches that declare `host_tier`, and of those that do not. The suite of one that does overrides
    `elsewhere`.
    """

    contract = "prefix_cache"

    def elsewhere(self, room: int) -> Elsewhere:
        """Return where the cache under test may keep so many pages beyond the device."""
        raise NotImplementedError("the suite of a cache with the capability host_tier says where it keeps prefixes")

    def promise_books(self, page_size: int = 1, num_pages: int = 128, *, room: int = 256) -> PromiseBooks:
        return PromiseBooks(self.build, num_pages, page_size, elsewhere=self.elsewhere(room))

    def used(self, books: PromiseBooks, tokens: Sequence[int], namespace: str = "") -> None:
        """Insert something and find it again, so that any cache thinks it worth keeping, and let all moves end."""
        books.insert(tokens, namespace)
        for _ in range(4):
            books.settle()
            books.match(tokens, namespace)
        books.settle()

    def kept_elsewhere(self, books: PromiseBooks, tokens: Sequence[int], namespace: str = "") -> None:
        """Have something kept elsewhere alone."""
        self.used(books, tokens, namespace)
        books.evict(1_000_000)
        found = books.match(tokens, namespace)
        assert len(found) == 0
        assert found.promised > 0, (
            "a prefix that was found four times, was evicted and has room elsewhere is not promised"
        )

    def through(self, books: PromiseBooks, tokens: Sequence[int], namespace: str = "") -> Request:
        """Have what is promised of something loaded, which looks at every page, and let it go."""
        lock = books.lock(tokens, namespace)
        request = books.load(lock)
        books.loaded(request, True)
        books.let_go(request.slots)
        books.unlock(lock)
        return request

    def crowd(self, books: PromiseBooks, count: int = 12) -> None:
        """Let many others come and go, more than there is room for, and leave nothing on the device."""
        for char in range(count):
            tokens = run_of(*range(1000 + 100 * char, 1000 + 100 * char + LENGTH // 2), page_size=books.page_size)
            missing = len(tokens) - books.allocator.free_tokens
            if missing > 0:
                books.evict(missing)
            self.used(books, tokens)
            books.evict(1_000_000)

    @lacks("host_tier")
    def test_without_a_host_tier_nothing_is_loaded(self) -> None:
        allocator = CountingAllocator(64)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, 1))
        slots = allocator.alloc_slots(LENGTH)
        cache.insert(key_of(range(LENGTH)), slots)
        cache.evict(LENGTH)
        found = cache.match(key_of(range(LENGTH)))
        assert (found.promised, dict(found.promised_from), found.arriving) == (0, {}, False)
        assert (cache.origins, cache.loader) == ((), "")
        cache.lock(found.handle)
        with pytest.raises(Unsupported):
            cache.load(found.handle, np.empty(0, np.int64))

    @capability("host_tier")
    @sizes
    def test_what_was_evicted_comes_back_from_the_host(self, page_size: int) -> None:
        books = self.promise_books(page_size)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.kept_elsewhere(books, tokens)
        lock = books.lock([*tokens, 7, 7])
        request = books.load(lock)
        books.loaded(request, True)
        longer = books.keep(request)
        assert len(books.match(tokens)) == longer.length == len(request.slots)
        books.unlock(longer)

    @capability("host_tier")
    @sizes
    def test_the_host_goes_on_where_the_device_ends(self, page_size: int) -> None:
        books = self.promise_books(page_size)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.used(books, tokens)
        books.evict(LENGTH // 2 * page_size)
        found = books.match(tokens)
        assert len(found) == LENGTH // 2 * page_size
        assert found.promised > 0
        assert books.cache.matched_length(key_of(tokens)) == len(found) + found.promised
        request = self.through(books, tokens)
        assert len(request.slots) == found.promised

    @capability("host_tier")
    def test_a_fork_on_the_host_is_found_up_to_where_it_leaves(self) -> None:
        books = self.promise_books()
        tokens = [*range(LENGTH)]
        self.kept_elsewhere(books, tokens)
        fork = [*tokens[:30], *range(500, 510)]
        assert len(self.through(books, fork).slots) <= 30
        books.insert(fork)
        assert len(books.match(tokens)) == 30
        self.through(books, tokens)

    @capability("host_tier")
    def test_the_host_keeps_namespaces_apart(self) -> None:
        books = self.promise_books()
        self.kept_elsewhere(books, range(LENGTH), "one")
        assert books.match(range(LENGTH), "two").promised == 0
        assert books.match(range(LENGTH)).promised == 0
        self.kept_elsewhere(books, range(LENGTH), "two")
        self.through(books, range(LENGTH), "one")
        self.through(books, range(LENGTH), "two")

    @capability("host_tier")
    @sizes
    def test_a_lock_keeps_what_was_found_on_the_host(self, page_size: int) -> None:
        books = self.promise_books(page_size, room=64)
        tokens = run_of(*range(LENGTH), page_size=page_size)
        self.kept_elsewhere(books, tokens)
        lock = books.lock(tokens)
        self.crowd(books)
        books.evict(1_000_000)
        request = books.load(lock)
        books.loaded(request, True)
        books.unlock(books.keep(request))

    @capability("host_tier")
    def test_what_is_being_loaded_stays_as_it_is(self) -> None:
        """Also where the request is gone before its load is through: a copy may still read these pages."""
        books = self.promise_books(room=64)
        tokens = range(LENGTH)
        self.kept_elsewhere(books, tokens)
        lock = books.lock(tokens)
        request = books.load(lock)
        books.unlock(lock)
        self.crowd(books)
        books.loaded(request, True)
        books.let_go(request.slots)
        self.crowd(books)

    @capability("host_tier")
    def test_a_load_that_failed_changes_nothing(self) -> None:
        books = self.promise_books()
        self.kept_elsewhere(books, range(LENGTH))
        lock = books.lock(range(LENGTH))
        for ok in (False, False, True):
            request = books.load(lock)
            books.loaded(request, ok)
            books.let_go(request.slots)
        assert books.match(range(LENGTH)).promised == lock.promised
        books.unlock(lock)

    @capability("host_tier")
    def test_that_another_one_loads_is_told(self) -> None:
        books = self.promise_books()
        self.kept_elsewhere(books, range(LENGTH))
        lock = books.lock(range(LENGTH))
        assert not books.match(range(LENGTH)).arriving
        version = books.cache.version
        requests = [books.load(lock), books.load(lock)]
        assert books.cache.version > version, "what a match answers has changed"
        for request in requests:
            assert books.match(range(LENGTH)).arriving
            version = books.cache.version
            books.loaded(request, False)
            books.let_go(request.slots)
        assert books.cache.version > version, "what a match answers has changed"
        assert not books.match(range(LENGTH)).arriving
        books.unlock(lock)

    @capability("host_tier")
    def test_loads_are_refused_where_they_make_no_sense(self) -> None:
        books = self.promise_books()
        self.kept_elsewhere(books, range(LENGTH))
        found = books.match(range(LENGTH))
        slots = books.alloc(found.promised)
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
