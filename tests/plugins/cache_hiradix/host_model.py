"""What the host must have: an oracle of copies that were begun, that arrived, and that were torn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pegboard.conformance.prefix_cache.books import Prefix
from pegboard.core.interfaces.keys import PrefixMemo
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext, PrefixMatch
from pegboard.plugins.kv_tiers.suite.prefix_tier_books import TierBooks
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandJob, HandMover

Finds = Literal["exactly", "at most", "anything"]


class ModelBooks(TierBooks):
    """Books with a dictionary of all copies on the host: each prefix, and its job until it has arrived.

    It learns from the mover which copies are begun, and sees itself which pages are freed meanwhile. What a match may
    find is what the dictionary says: `exactly` where the host has room for everything, `at most` where it evicts; and
    `anything`, as long as it is right, where storages bring more.
    """

    def __init__(
        self,
        build: Callable[[PrefixCacheContext], PrefixCache],
        num_pages: int,
        page_size: int,
        mover: HandMover,
        finds: Finds,
        threshold: int = 1,
    ) -> None:
        self.finds = finds
        self.threshold = threshold
        self.copies: dict[Prefix, HandJob | None] = {}
        self.under_way: dict[HandJob, list[Any]] = {}
        self.torn: set[tuple[HandJob, int]] = set()
        self.waited = False
        self.answers: dict[Prefix, tuple[int, object]] = {}
        mover.on_begin = self._begun
        super().__init__(build, num_pages, page_size, mover=mover)

    def match(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> PrefixMatch:
        version = self.cache.version
        found = super().match(tokens, namespace, memo=memo)
        self._compare_with_before(version, (namespace, tuple(tokens)), found)
        more = self._on_host(tokens, namespace) - len(found)
        wanted = more if more >= self.threshold else 0
        if self.finds == "exactly":
            assert found.promised == wanted, f"{found.promised} tokens of {list(tokens)} on the host, not {wanted}"
        elif self.finds == "at most":
            assert found.promised <= wanted, f"{found.promised} tokens of {list(tokens)} on the host, not {wanted}"
        return found

    def _compare_with_before(self, version: int, asked: Prefix, found: PrefixMatch) -> None:
        """Who remembers an answer and the version may go on to use it."""
        answer = (found.slots.tolist(), found.promised, dict(found.promised_from), found.arriving)
        before, known = self.answers.get(asked, (-1, answer))
        assert version > before or answer == known, f"{asked} had the answer {known}, now {answer}, and no new version"
        self.answers[asked] = (version, answer)

    def evict(self, num_tokens: int) -> int:
        before = set(self.known.values())
        freed = super().evict(num_tokens)
        if self.waited:  # then the cache has taken results, too
            self._take_results()
        self._freed(before - set(self.known.values()))
        return freed

    def reset(self) -> None:
        super().reset()
        self.copies.clear()
        self.under_way.clear()
        self.waited = False

    def poll(self) -> None:
        super().poll()
        self._take_results()

    def _take_results(self) -> None:
        self.waited = False
        for job in [job for job in self.under_way if job.done]:
            self._ended(job, self.under_way.pop(job))

    def _begun(self, job: HandJob) -> None:
        if job.kind != "save":
            return
        prefixes = [self.mover.device[page] for page in job.device.tolist()]
        for page, prefix in zip(job.device.tolist(), prefixes, strict=True):
            assert isinstance(prefix, tuple), f"page {page} is copied, but was never computed"
            known = prefix in self.copies and self.finds == "exactly"
            assert not known, f"{prefix} is copied, but has a copy"
            self.copies[prefix] = job
        self.under_way[job] = prefixes

    def _freed(self, pages: set[int]) -> None:
        for job in self.under_way:
            self.torn |= {(job, index) for index, page in enumerate(job.device.tolist()) if page in pages}

    def _ended(self, job: HandJob, prefixes: list[Prefix]) -> None:
        """A copy that is torn or did not come goes, and all below it go along."""
        lost = [p for index, p in enumerate(prefixes) if index >= job.result or (job, index) in self.torn]
        for prefix in prefixes:
            if self.copies.get(prefix) is job and prefix not in lost:
                self.copies[prefix] = None
        for space, tokens in lost:
            if self.copies.get((space, tokens)) is job:
                n = len(tokens)
                self.copies = {p: j for p, j in self.copies.items() if p[0] != space or p[1][:n] != tokens}

    def _on_host(self, tokens: Sequence[int], namespace: str) -> int:
        """How many tokens, from the first on, have copies that have arrived."""
        end = 0
        while end + self.page_size <= len(tokens):
            if self.copies.get((namespace, tuple(tokens[: end + self.page_size])), self) is not None:
                break
            end += self.page_size
        return end
