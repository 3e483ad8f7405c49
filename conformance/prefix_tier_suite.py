"""What all tests of prefix caches with tiers start from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pegboard.conformance.prefix_books import run_of
from pegboard.conformance.prefix_suite import PrefixSuite
from pegboard.conformance.prefix_tier_books import Request, TierBooks
from pegboard.conformance.tier_fakes import HandMover
from pegboard.core.interfaces.page_mover import Job

sizes = pytest.mark.parametrize("page_size", [1, 16])
LENGTH = 40
"""Pages of a prompt, so many that any cache finds them worth a load."""


class TierSuite(PrefixSuite):
    """Builds a cache over a mover whose jobs wait until the test, or the cache itself, waits for them."""

    contract = "prefix_cache"

    def tier_books(
        self,
        page_size: int = 1,
        num_pages: int = 128,
        *,
        host_pages: int = 256,
        block_pages: int = 1,
        stores: Sequence[str] = (),
    ) -> TierBooks:
        mover = HandMover(host_pages, block_pages, stores)

        def end(jobs: Sequence[Job]) -> None:
            for job in [job for job in mover.jobs if job in jobs]:
                mover.finish(job)

        mover.on_wait = end
        return TierBooks(self.build, num_pages, page_size, mover=mover)

    def used(self, books: TierBooks, tokens: Sequence[int], namespace: str = "") -> None:
        """Insert something and find it again, so that any cache thinks it worth a copy, and let all copies end."""
        books.insert(tokens, namespace)
        for _ in range(4):
            books.settle()
            books.match(tokens, namespace)
        books.settle()

    def on_the_host(self, books: TierBooks, tokens: Sequence[int], namespace: str = "") -> None:
        """Have something on the host alone."""
        self.used(books, tokens, namespace)
        books.evict(1_000_000)
        found = books.match(tokens, namespace)
        assert len(found) == 0
        assert found.host_len > 0, (
            "a prefix that was found four times, was evicted and has room on the host is not found there"
        )

    def through(self, books: TierBooks, tokens: Sequence[int], namespace: str = "") -> Request:
        """Have what the host has of something loaded, which looks at every page, and let it go."""
        lock = books.lock(tokens, namespace)
        request = books.load(lock)
        books.loaded(request, True)
        books.let_go(request.slots)
        books.unlock(lock)
        return request

    def crowd(self, books: TierBooks, count: int = 12) -> None:
        """Let many others come and go, more than the host has room for, and leave nothing on the device."""
        for char in range(count):
            tokens = run_of(*range(1000 + 100 * char, 1000 + 100 * char + LENGTH // 2), page_size=books.page_size)
            missing = len(tokens) - books.allocator.free_tokens
            if missing > 0:
                books.evict(missing)
            self.used(books, tokens)
            books.evict(1_000_000)
