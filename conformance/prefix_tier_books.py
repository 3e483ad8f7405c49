"""A caller of a prefix cache with tiers, which knows what is in every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.conformance.prefix_books import Books, Lock, Prefix, key_of
from pegboard.conformance.tier_fakes import HandJob, HandMover
from pegboard.core.interfaces.keys import PrefixMemo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.prefix_cache import (
        CacheHandle,
        InsertResult,
        PageLoad,
        Prefetch,
        PrefixCache,
        PrefixCacheContext,
        PrefixMatch,
    )


@dataclass(eq=False)
class TierLock(Lock):
    """A lock on a path and on the `host_len` tokens that its match found behind it."""

    host_len: int = 0


@dataclass(eq=False)
class Request:
    """One that has its prefix loaded: `slots` are those of the load, its own."""

    lock: TierLock
    load: PageLoad
    slots: NDArray[np.int64]
    locked: bool = True


class TierBooks(Books):
    """Books that write into each page which tokens it was computed for, and look at what they find.

    A page holds the namespace and all tokens up to its end; so one that was torn, exchanged, moved or overwritten
    shows. What is allocated holds something else at once, as pages do that others write to.
    """

    def __init__(
        self,
        build: Callable[[PrefixCacheContext], PrefixCache],
        num_pages: int = 64,
        page_size: int = 1,
        *,
        mover: HandMover,
    ) -> None:
        super().__init__(build, num_pages, page_size, mover)
        self.mover = mover
        self.requests: list[Request] = []
        self._scratch = 0

    def alloc(self, num_tokens: int) -> NDArray[np.int64]:
        slots = super().alloc(num_tokens)
        for page in np.unique(slots // self.page_size).tolist():
            self._scratch += 1
            self.mover.device[page] = self._scratch
        return slots

    def content(self, tokens: Sequence[int], namespace: str, end: int) -> Prefix:
        """Return what a page holds that ends after `end` tokens."""
        return namespace, tuple(tokens[:end])

    def compute(self, tokens: Sequence[int], namespace: str, slots: NDArray[np.int64], start: int = 0) -> None:
        """Write what belongs there into those of the caller's pages that the tokens from `start` on fill."""
        size = self.page_size
        for at in range(0, slots.size - size + 1, size):
            page = int(slots[at]) // size
            if page in self.held:
                self.mover.device[page] = self.content(tokens, namespace, start + at + size)

    def match(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> PrefixMatch:
        found = super().match(tokens, namespace, memo=memo)
        self._look(tokens, namespace, 0, found.slots[:: self.page_size] // self.page_size, self.mover.device)
        whole = len(found) + found.host_len
        assert found.host_len % self.page_size == 0, f"{found.host_len} tokens on the host are not whole pages"
        assert 0 <= found.stored_len <= found.host_len, f"{found.stored_len} of {found.host_len} come from storages"
        assert whole <= len(tokens), f"{whole} of {len(tokens)} tokens are found"
        return found

    def lock(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> TierLock:
        found = self.match(tokens, namespace, memo=memo)
        lock = self.lock_handle(found.handle, tokens, namespace, len(found))
        lock.host_len = found.host_len
        return lock

    def lock_handle(self, handle: CacheHandle, tokens: Sequence[int], namespace: str, length: int) -> TierLock:
        self.cache.lock(handle)
        others = [lock for lock in self.locks if lock.handle is handle and isinstance(lock, TierLock)]
        lock = TierLock(handle, tuple(tokens), namespace, length, others[0].host_len if others else 0)
        self.locks.append(lock)
        self.check()
        return lock

    def insert(
        self,
        tokens: Sequence[int],
        namespace: str = "",
        *,
        slots: NDArray[np.int64] | None = None,
        priority: int = 0,
        memo: PrefixMemo | None = None,
    ) -> InsertResult:
        slots = self.alloc(len(tokens)) if slots is None else slots
        self.compute(tokens, namespace, slots)
        return super().insert(tokens, namespace, slots=slots, priority=priority, memo=memo)

    def extend(
        self,
        lock: Lock,
        tokens: Sequence[int],
        *,
        slots: NDArray[np.int64] | None = None,
        priority: int = 0,
        memo: PrefixMemo | None = None,
    ) -> InsertResult:
        slots = self.alloc(len(tokens) - lock.length) if slots is None else slots
        self.compute(tokens, lock.namespace, slots, lock.length)
        return super().extend(lock, tokens, slots=slots, priority=priority, memo=memo)

    @property
    def locked(self) -> bool:
        return super().locked or any(isinstance(lock, TierLock) and lock.host_len for lock in self.locks)

    def load(self, lock: TierLock) -> Request:
        """Have what the host has behind a lock loaded into new pages."""
        slots = self.alloc(lock.host_len)
        load = self.cache.load(lock.handle, slots)
        assert load.device.tolist() == (slots[:: self.page_size] // self.page_size).tolist(), "a load to other pages"
        assert load.host.shape == load.device.shape, f"{load.host.shape} host pages for {load.device.shape} pages"
        request = Request(lock, load, slots)
        self.requests.append(request)
        self.check()
        return request

    def loaded(self, request: Request, ok: bool) -> None:
        """End a load, after its pages were copied where it is `ok`."""
        if ok:
            self.mover.load(request.load.host, request.load.device)
            start, pages = request.lock.length, request.load.device
            self._look(request.lock.tokens, request.lock.namespace, start, pages, self.mover.device)
        self.requests.remove(request)
        self.cache.loaded(request.load, ok)
        self.check()

    def keep(self, request: Request) -> TierLock:
        """Insert what was loaded and goes on to be locked, as after a step."""
        lock = request.lock
        tokens = lock.tokens[: lock.length + lock.host_len]
        result = self.extend(lock, tokens, slots=request.slots)
        longer = self.lock_handle(result.handle, tokens, lock.namespace, len(tokens))
        self.unlock(lock)
        return longer

    def let_go(self, slots: NDArray[np.int64]) -> None:
        """Free pages of the caller."""
        own = np.unique(slots // self.page_size)
        self.allocator.free(own)
        self.held.difference_update(own.tolist())

    def finish(self, job: HandJob, result: int | None = None, error: str = "") -> None:
        self.mover.finish(job, result, error)

    def poll(self) -> None:
        owned = set(self.allocator.held)
        self.cache.poll()
        assert self.allocator.held == owned, "poll changed the owner of a page"
        self.check()

    def prefetch(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> Prefetch:
        owned = set(self.allocator.held)
        found = self.cache.prefetch(key_of(tokens, namespace, memo))
        assert self.allocator.held == owned, "prefetch changed the owner of a page"
        self.check()
        return found

    def settle(self) -> None:
        """Let everything come to its end."""
        for _ in range(100):
            for job in list(self.mover.jobs):
                self.finish(job)
            self.poll()
            if not self.mover.jobs and not self.cache.busy:
                return
        raise AssertionError("the cache does not come to rest though all of its jobs are done")

    def check(self) -> None:
        super().check()
        for request in self.requests:
            lock = request.lock
            self._look(lock.tokens, lock.namespace, lock.length, request.load.host, self.mover.host)

    def _look(
        self,
        tokens: Sequence[int],
        namespace: str,
        start: int,
        pages: NDArray[np.int64],
        where: dict[int, object],
    ) -> None:
        tier = "device" if where is self.mover.device else "host"
        for index, page in enumerate(pages.tolist()):
            wanted = self.content(tokens, namespace, start + (index + 1) * self.page_size)
            assert where.get(page) == wanted, f"the {tier}'s page {page} holds {where.get(page)}, not {wanted}"
