"""The suite of PrefixCache: what a cache brings from storages."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.books import run_of
from pegboard.conformance.suite import capability
from pegboard.plugins.kv_tiers.suite.prefix_tier_books import TierBooks
from pegboard.plugins.kv_tiers.suite.prefix_tier_suite import TierSuite


class PrefetchTests(TierSuite):
    """Of caches that declare `prefetch`."""

    contract = "prefix_cache"

    PROMPT = 512
    """Tokens of a prompt, so many that any cache finds them worth a prefetch."""

    def stored(self, page_size: int, namespace: str = "") -> TierBooks:
        """Return books of a cache that has forgotten a prompt which a storage has."""
        books = self.tier_books(
            page_size, 2048 // page_size, host_pages=4096 // page_size, block_pages=64 // page_size, stores=("one",)
        )
        self.used(books, self.prompt(page_size), namespace)
        books.evict(1_000_000)
        books.reset()
        books.settle()
        assert books.mover.blocks[0], "a prefix that was found four times is not written to a storage that has room"
        assert books.match(self.prompt(page_size), namespace).promised == 0
        return books

    def prompt(self, page_size: int) -> list[int]:
        return run_of(*range(self.PROMPT // page_size), page_size=page_size)

    @capability("prefetch")
    @pytest.mark.parametrize("page_size", [4, 16])
    def test_what_a_storage_has_comes_to_the_host(self, page_size: int) -> None:
        books = self.stored(page_size)
        prefetch = books.prefetch([*self.prompt(page_size), *range(200)])
        at_once = prefetch.done
        books.settle()
        assert (at_once, prefetch.done) == (False, True)
        assert prefetch.tokens == prefetch.wanted == self.PROMPT
        found = books.match(self.prompt(page_size))
        assert (found.promised, dict(found.promised_from)) == (self.PROMPT, {"host": 0, "storage": self.PROMPT})
        self.through(books, self.prompt(page_size))
        assert books.match(self.prompt(page_size)).promised_from["storage"] == 0, "what was loaded has been told"
        prefetch.close()

    @capability("prefetch")
    def test_a_miss_is_over_soon_and_takes_no_pages(self) -> None:
        books = self.stored(16)
        prefetch = books.prefetch([9, *self.prompt(16)])
        for _ in range(3):
            assert all(job.kind == "find" for job in books.mover.jobs)
            books.mover.finish_all()
            books.poll()
        assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (True, 0, 0)
        prefetch.close()

    @capability("prefetch")
    def test_storages_keep_namespaces_apart(self) -> None:
        books = self.stored(16, "one")
        for namespace in ("", "two"):
            books.prefetch(self.prompt(16), namespace)
            books.settle()
            assert books.match(self.prompt(16), namespace).promised == 0
        books.prefetch(self.prompt(16), "one")
        books.settle()
        self.through(books, self.prompt(16), "one")

    @capability("prefetch")
    @pytest.mark.parametrize("came", [0, 1, 3])
    def test_what_has_come_is_kept_and_the_rest_is_not_there(self, came: int) -> None:
        books = self.stored(16)
        prefetch = books.prefetch(self.prompt(16))
        books.mover.finish_all("find")
        books.poll()
        assert prefetch.wanted == self.PROMPT
        books.finish(books.mover.jobs[0], result=came, error="it broke" if came else "")
        books.settle()
        assert prefetch.done
        assert prefetch.tokens == came * 64
        assert books.match(self.prompt(16)).promised == came * 64
        self.through(books, self.prompt(16))

    @capability("prefetch")
    def test_what_goes_on_is_not_in_the_way(self) -> None:
        """Closed at any time: its pages are given to others once nothing writes to them, and to none before."""
        books = self.stored(16)
        for ended in range(4):
            prefetch = books.prefetch(self.prompt(16))
            for _ in range(ended):
                books.mover.finish_all()
                books.poll()
            prefetch.close()
            prefetch.close()
            assert prefetch.done
            self.crowd(books, 4)
            books.settle()
            self.through(books, self.prompt(16))
            books.evict(1_000_000)
            books.reset()

    @capability("prefetch")
    def test_two_who_want_the_same_get_it_once(self) -> None:
        books = self.stored(16)
        both = [books.prefetch(self.prompt(16)), books.prefetch([*self.prompt(16), 7, 7])]
        fetched: list[bytes] = []
        for _ in range(50):
            for job in list(books.mover.jobs):
                fetched += job.keys if job.kind == "fetch" else []
                books.finish(job)
            books.poll()
        assert [one.tokens for one in both if one.done] == [self.PROMPT] * 2
        assert len(fetched) == len(set(fetched)) == self.PROMPT // 64, "a block was fetched twice"
        for one in both:
            one.close()

    @capability("prefetch")
    def test_nothing_is_awaited_without_storages(self) -> None:
        books = self.tier_books(16)
        prefetch = books.prefetch(self.prompt(16))
        assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (True, 0, 0)
        assert not books.mover.jobs
