"""The suite of PrefixCache: what is inserted is found, and shared where it can be."""

from __future__ import annotations

import numpy as np

from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import run_of
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.keys import PrefixKey


class FindingTests(PrefixSuite):
    """Of caches that declare `reuse`: match, insert and the pages that are duplicates."""

    contract = "prefix_cache"

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
        """The way of a chunked prompt: what was inserted before comes again, with the next chunk after it."""
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
