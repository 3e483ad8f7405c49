"""A state machine over the cache with tiers: any calls, and jobs that end in any order and with any result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pegboard.conformance.prefix_cache.machine import NAMESPACES, CacheMachine
from pegboard.conformance.prefix_cache.promise_books import Request
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.cache_hiradix.options import HiRadixOptions
from pegboard.plugins.kv_tiers.api import Job, Prefetch
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandMover
from tests.plugins.cache_hiradix.host_model import Finds, ModelBooks

GOES = ["through", "begins", "begins and goes", "waits", "two wait"]
"""How far a request gets. One goes while it is loaded; of two that wait for the same, the first goes."""

CHARS = st.lists(st.integers(0, 2), max_size=6)


class TierMachine(CacheMachine):
    """`ModelBooks` compare after each call. Class attributes say what is built."""

    cache: type[HiRadixCache] = HiRadixCache
    page_size = 1
    num_pages = 16
    host_pages = 2000
    block_pages = 2
    stores: tuple[str, ...] = ()
    finds: Finds = "exactly"
    options: dict[str, Any] = {}
    steps = 0
    totals: Mapping[str, float] = {}

    books: ModelBooks

    def make(self) -> ModelBooks:
        options = HiRadixOptions.model_validate({"load_threshold": 1, "prefetch_threshold": 1, **self.options})
        mover = HandMover(self.host_pages, self.block_pages, self.stores)
        mover.on_wait = self.waited
        self.answers = self.strangers = 0
        self.prefetches: list[tuple[Prefetch, list[int], str]] = []
        return ModelBooks(
            lambda ctx: self.cache(options, ctx), self.num_pages, self.page_size, mover, self.finds,
            options.load_threshold,
        )  # fmt: skip

    def waited(self, jobs: Sequence[Job]) -> None:
        """Some jobs that are waited for end in time, some do not."""
        self.answers += 1
        self.books.waited = True
        for job in [job for job in self.books.mover.jobs if job in jobs]:
            if self.answers % 3:
                self.books.finish(job)

    @precondition(lambda self: self.books.mover.jobs)
    @rule(which=st.integers(0, 100), result=st.one_of(st.none(), st.integers(0, 3)), poll=st.booleans())
    def end_job(self, which: int, result: int | None, poll: bool) -> None:
        jobs = self.books.mover.jobs
        self.books.finish(jobs[which % len(jobs)], result, "" if result is None else "it broke")
        if poll:
            self.books.poll()

    @precondition(lambda self: self.books.mover.jobs)
    @rule(short=st.booleans())
    def end_jobs(self, short: bool) -> None:
        """All of them, and with `short` none has done more than its first page or block."""
        for job in list(self.books.mover.jobs):
            self.books.finish(job, 1 if short else None)
        self.books.poll()

    @rule()
    def poll(self) -> None:
        self.books.poll()

    @rule(chars=CHARS, namespace=NAMESPACES)
    def begin(self, chars: list[int], namespace: str) -> None:
        self.load(self.tokens_of(chars, 0), namespace)

    def load(self, tokens: Sequence[int], namespace: str) -> Request | None:
        """Play a request whose prefix goes on on the host."""
        lock = self.books.lock(tokens, namespace)
        if lock.promised and self.room(lock.promised):
            return self.books.load(lock)
        return None

    def through(self, tokens: Sequence[int], namespace: str) -> None:
        """Play one whose load goes well."""
        request = self.load(tokens, namespace)
        if request is not None:
            self.books.loaded(request, True)
            self.let_it_go(request, True)

    @precondition(lambda self: self.books.copies)
    @rule(
        which=st.integers(0, 1000),
        tokens=st.integers(8, 40),
        calm=st.booleans(),
        go=st.sampled_from(GOES),
        others=st.sampled_from([0, 4]),
    )
    def come_back(self, which: int, tokens: int, calm: bool, go: str, others: int) -> None:
        """Play a request for something that was copied once, after most has gone, and others behind it."""
        self.books.mover.finish_all("save")
        if calm:
            self.unlock_all(tails=go == "through")
        self.books.poll()
        self.evict(tokens * self.page_size)
        known = sorted(self.books.copies)
        if known:
            namespace, wanted = known[which % len(known)]
            if go == "through":
                self.through(wanted, namespace)
            elif go.startswith("begins"):
                request = self.load(wanted, namespace)
                if request is not None and go == "begins and goes":
                    self.books.unlock(request.lock)
            else:
                first = self.books.lock(wanted, namespace)
                if go == "two wait":
                    self.books.lock(wanted, namespace)
                    self.books.unlock(first)
            if others:
                self.crowd(others)

    def unlock_all(self, tails: bool) -> None:
        """Let all requests go but those that load, and with `tails` those that found something on the host."""
        keep = [request.lock for request in self.books.requests]
        if not tails:
            keep += [held for held in self.books.locks if held.promised]
        for held in [held for held in self.books.locks if held not in keep]:
            self.books.unlock(held)

    @precondition(lambda self: self.books.known)
    @rule(which=st.integers(0, 1000), tokens=st.integers(1, 16), tails=st.booleans())
    def find_and_lose(self, which: int, tokens: int, tails: bool) -> None:
        """What is found may be copied for it, and evicted before that is done, and somebody asks again."""
        known = sorted(self.books.known)
        namespace, wanted = known[which % len(known)]
        self.books.match(wanted, namespace)
        self.unlock_all(tails)
        self.evict(tokens * self.page_size)
        self.books.match(wanted, namespace)

    @rule(count=st.integers(1, 4))
    def crowd(self, count: int) -> None:
        """Play others that are never seen again, and take the room of what is not locked."""
        for _ in range(count):
            self.strangers += 1
            tokens = self.tokens_of([100 * self.strangers + at for at in range(4)], 0)
            if self.room(len(tokens)):
                self.books.insert(tokens)
                self.books.mover.finish_all()
                self.books.poll()
                self.evict(self.num_pages * self.page_size)
        for lock in list(self.books.locks):
            if lock.promised and self.room(lock.promised):
                request = self.books.load(lock)
                self.books.loaded(request, True)
                self.let_go(request.slots)

    @precondition(lambda self: self.books.mover.stores and self.books.copies)
    @rule(data=st.data(), more=CHARS)
    def start_anew(self, data: st.DataObject, more: list[int]) -> None:
        """What is in storages comes back after everything else has gone."""
        books = self.books
        known = sorted(books.copies)
        for _ in range(2):
            books.mover.finish_all()
            books.poll()
        for request in list(books.requests):
            books.loaded(request, False)
            self.let_it_go(request, False)
        for held in list(books.locks):
            books.unlock(held)
        self.reset()
        for _ in range(2):
            namespace, tokens = data.draw(st.sampled_from(known))
            self.want([*tokens, *self.tokens_of(more, 0)], data.draw(NAMESPACES))
        for result in data.draw(st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=2, max_size=6)):
            if books.mover.jobs:
                books.finish(books.mover.jobs[0], result)
            books.poll()
        for _, wanted, namespace in self.prefetches[-2:]:
            self.through(wanted, namespace)

    @precondition(lambda self: self.books.answers)
    @rule(which=st.integers(0, 1000))
    def ask_again(self, which: int) -> None:
        asked = sorted(self.books.answers)
        namespace, tokens = asked[which % len(asked)]
        self.books.match(tokens, namespace)

    @precondition(lambda self: self.books.requests)
    @rule(which=st.integers(0, 100), ok=st.booleans(), keep=st.booleans())
    def end_load(self, which: int, ok: bool, keep: bool) -> None:
        request = self.books.requests[which % len(self.books.requests)]
        self.books.loaded(request, ok)
        self.let_it_go(request, keep and ok)

    def let_it_go(self, request: Request, keep: bool) -> None:
        locked = request.lock in self.books.locks
        if keep and locked:
            self.books.keep(request)
            return
        self.let_go(request.slots)
        if locked:
            self.books.unlock(request.lock)

    @precondition(lambda self: self.books.locks)
    @rule(which=st.integers(0, 100))
    def load_again(self, which: int) -> None:
        """What the host has of a locked prefix can be loaded at any time, and as often as one likes."""
        lock = self.books.locks[which % len(self.books.locks)]
        if lock.promised and self.room(lock.promised):
            self.books.load(lock)

    @precondition(lambda self: self.books.mover.stores)
    @rule(chars=st.lists(st.integers(0, 2), max_size=8), namespace=NAMESPACES)
    def prefetch(self, chars: list[int], namespace: str) -> None:
        self.want(self.tokens_of(chars, 0), namespace)

    def want(self, tokens: list[int], namespace: str) -> None:
        self.prefetches.append((self.books.prefetch(tokens, namespace), tokens, namespace))

    @precondition(lambda self: self.prefetches)
    @rule(which=st.integers(0, 100))
    def close_prefetch(self, which: int) -> None:
        one, _, _ = self.prefetches.pop(which % len(self.prefetches))
        one.close()
        one.close()
        self.books.check()

    @invariant()
    def count(self) -> None:
        type(self).steps += 1

    def teardown(self) -> None:
        """At the end everything comes back."""
        books = self.books
        for request in list(books.requests):
            books.loaded(request, False)
            self.let_it_go(request, False)
        books.settle()
        assert all(one.done for one, _, _ in self.prefetches), "all jobs are over, but not all prefetches"
        super().teardown()
        books.reset()
        books.settle()
        stats = books.cache.stats()
        type(self).totals = Counter(type(self).totals) + Counter(stats)
        assert stats["quarantined_tokens"] == 0, stats
        assert stats["host_free_tokens"] == self.host_pages * self.page_size, stats
