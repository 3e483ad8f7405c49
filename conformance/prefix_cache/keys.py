"""The suite of PrefixCache: sequences that a weak digest, or a careless key, takes for one another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_cache.base import PrefixSuite, pages
from pegboard.conformance.prefix_cache.books import Prefix, key_of, run_of
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext

_NUMBERS = {
    "they differ by 2**8": (5, 5 + (1 << 8)),
    "they differ by 2**16": (5, 5 + (1 << 16)),
    "they differ by 2**31": (5, 5 + (1 << 31)),
    "they differ by 2**32": (5, 5 + (1 << 32)),
    "they are equal as float32": (1 << 24, (1 << 24) + 1),
    "they are equal as float64": (1 << 53, (1 << 53) + 1),
    "they differ in their sign": (7, -7),
    "they are negative, as at media": (-5, -6),
    "one is negative, and none of the vocabulary's": (-6, 0),
    "their hash() is equal": (-1, -2),
    "their hash() is equal, too": (0, (1 << 61) - 1),
    "they are negative and have 62 bits, as at media": (-(1 << 62), -(1 << 62) + 1),
    "the CRC-32 of their bytes is equal": (4074780537047137935, 4280053075164014822),
    "the CRC-32 of their text is equal": (1722125039457238697, 4483578670304019550),
    "the Adler-32 of their bytes is equal": (125888, 60863),
    "the Adler-32 of their text is equal": (16543, 31690),
}
_NAMESPACES = {
    "they differ in the namespace alone": ("a", "b"),
    "a namespace is not a prefix of another": ("a", "ab"),
    "namespaces differ in case": ("a", "A"),
    "namespaces differ in blanks": ("a", "a "),
    "the empty namespace is one too": ("", "\0"),
    "a namespace may be a separator": (":", "/"),
    "a namespace may be any text": ("\ud800", "?"),
}


def _twins(page_size: int) -> Iterator[tuple[str, Prefix, Prefix]]:
    """Pairs that are not the same, and why one might think so."""

    def page(*tokens: int) -> tuple[int, ...]:
        return (*[0] * (page_size - len(tokens)), *tokens)

    for why, numbers in _NUMBERS.items():
        one, other = (("", page(number)) for number in numbers)
        yield why, one, other
    for why, names in _NAMESPACES.items():
        first, second = ((name, page(3)) for name in names)
        yield why, first, second
    yield "pages come in another order", ("", page(1) + page(2)), ("", page(2) + page(1))
    yield "pages have the same sum", ("", page(1) + page(4)), ("", page(2) + page(3))
    yield "joined, their digits are the same", ("", page(1) + page(23)), ("", page(12) + page(3))
    yield "namespace and token look the same when joined", ("1", page(2)), ("", page(12))
    yield "one has more zeros", ("", page(0) * 2), ("", page(0) * 3)
    yield "the end is the same", ("", page(1) + page(2) + page(3)), ("", page(4) + page(2) + page(3))
    if page_size > 1:
        yield "tokens come in another order", ("", page(1, 2)), ("", page(2, 1))
        yield "tokens have the same sum", ("", page(1, 4)), ("", page(2, 3))
        yield "joined, their digits are the same", ("", page(1, 23)), ("", page(12, 3))
    same = tuple(range(1, page_size + 1))
    for place in range(page_size):
        yield f"they differ in token {place}", ("", same), ("", (*same[:place], 99, *same[place + 1 :]))


class KeyTests(PrefixSuite):
    """A request that gets another prompt's KV reads what another client wrote: no two may be taken for one."""

    contract = "prefix_cache"

    @capability("reuse")
    @pages
    def test_no_two_sequences_are_taken_for_one(self, page_size: int) -> None:
        for why, (space, tokens), (other_space, other) in _twins(page_size):
            books = self.books(page_size, num_pages=8)
            books.insert(tokens, space)
            wanted = len(books.expected(other, other_space))
            cache, key = books.cache, key_of(other, other_space)
            remedy = (
                f"it takes {list(other)} in namespace {other_space!r} for {list(tokens)} in {space!r} ({why}). Compare "
                "namespace and tokens themselves, or a digest of 128 bits or more over all of them"
            )
            for name, found in (("match", len(cache.match(key))), ("matched_length", cache.matched_length(key))):
                assert found == wanted, f"{name} finds {found} tokens where {wanted} are cached: {remedy}"
            try:
                books.insert(other, other_space)
                books.match(tokens, space)
                books.match(other, other_space)
            except AssertionError as error:
                what = str(error).partition("\n")[0]
                raise AssertionError(f"with both of them inserted ({what}): {remedy}") from None

    @capability("reuse")
    @pages
    def test_a_page_is_found_only_behind_what_it_was_computed_behind(self, page_size: int) -> None:
        """The KV of a page depends on everything before it, and not on the page before it alone."""
        books = self.books(page_size)
        books.insert(run_of(1, 2, 3, 4, page_size=page_size))
        books.insert(run_of(5, 2, page_size=page_size))
        books.insert(run_of(6, page_size=page_size))
        for chars, length in (((5, 2, 3, 4), 2), ((6, 2, 3), 1), ((2, 3, 4), 0), ((1, 2, 2, 3), 2)):
            key = key_of(run_of(*chars, page_size=page_size))
            found = len(books.cache.match(key)) // page_size
            assert found == length, (
                f"pages 1 2 3 4, 5 2 and 6 are cached; of pages {chars} {found} are found and not {length}: what a "
                "page is found by must cover all that comes before it"
            )

    @capability("reuse")
    def test_digests_are_long_enough(self) -> None:
        """A thousand sequences, and four thousand that were never inserted: 16 bits tell sixty of them wrongly."""
        count = 1000
        allocator = CountingAllocator(count, 1)
        cache: PrefixCache = self.build(PrefixCacheContext(allocator, 1))
        tokens = np.random.default_rng(7).permutation(1 << 20)[: 5 * count].astype(np.int64) * 1_000_003
        for token, slot in zip(tokens.tolist(), allocator.alloc_slots(count).tolist(), strict=False):
            result = cache.insert(key_of([token]), np.array([slot], dtype=np.int64))
            assert result.slots.tolist() == [slot], f"[{token}] is new, but taken for what was inserted before"
        wrong = [token for token in tokens[count:].tolist() if cache.matched_length(key_of([token]))]
        assert not wrong, f"{len(wrong)} of {4 * count} sequences are found that were never inserted, {wrong[0]} first"
