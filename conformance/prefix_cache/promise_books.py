"""A caller of a prefix cache that promises prefixes, which knows what is in every page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pegboard.conformance.prefix_cache.books import Books, Lock, Prefix
from pegboard.core.interfaces.keys import PrefixMemo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.prefix_cache import (
        PrefixCache,
        PrefixCacheContext,
        PrefixMatch,
    )


class Elsewhere(Protocol):
    """Where a cache under test keeps prefixes beyond the device: plain values in place of KV.

    `services` go into its context. `device` is what each device page holds; what the cache has copied is read there.
    """

    @property
    def services(self) -> Mapping[str, object]: ...

    @property
    def device(self) -> dict[int, object]: ...

    def settle(self) -> bool:
        """End the moves that are under way; whether there were any."""

    def carry_out(self, load: object) -> NDArray[np.int64]:
        """Do what the device part does for a load, and return the device pages that it fills."""


@dataclass(eq=False)
class Request:
    """One that has its prefix loaded: `slots` are those of the load, its own."""

    lock: Lock
    load: object
    slots: NDArray[np.int64]


class PromiseBooks(Books):
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
        elsewhere: Elsewhere,
    ) -> None:
        super().__init__(build, num_pages, page_size, elsewhere.services)
        assert self.cache.loader, "a cache that promises prefixes names the device part that loads them"
        self.elsewhere = elsewhere
        self.requests: list[Request] = []
        self._scratch = 0

    def alloc(self, num_tokens: int) -> NDArray[np.int64]:
        slots = super().alloc(num_tokens)
        for page in np.unique(slots // self.page_size).tolist():
            self._scratch += 1
            self.elsewhere.device[page] = self._scratch
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
                self.elsewhere.device[page] = self.content(tokens, namespace, start + at + size)

    def match(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> PrefixMatch:
        found = super().match(tokens, namespace, memo=memo)
        self.look(tokens, namespace, 0, found.slots[:: self.page_size] // self.page_size, self.elsewhere.device)
        whole, origins = len(found) + found.promised, found.promised_from
        assert found.promised % self.page_size == 0, f"{found.promised} promised tokens are not whole pages"
        assert sum(origins.values()) == found.promised, f"{dict(origins)} are not the {found.promised} promised tokens"
        assert set(origins) <= set(self.cache.origins), f"{dict(origins)}, but origins are {self.cache.origins}"
        assert min(origins.values(), default=0) >= 0, f"{dict(origins)}"
        assert whole <= len(tokens), f"{whole} of {len(tokens)} tokens are found"
        return found

    def load(self, lock: Lock) -> Request:
        """Have what is promised behind a lock loaded into new pages."""
        slots = self.alloc(lock.promised)
        request = Request(lock, self.cache.load(lock.handle, slots), slots)
        self.requests.append(request)
        self.check()
        return request

    def loaded(self, request: Request, ok: bool) -> None:
        """End a load, after its pages were filled where it is `ok`."""
        if ok:
            pages = self.elsewhere.carry_out(request.load)
            wanted = request.slots[:: self.page_size] // self.page_size
            assert pages.tolist() == wanted.tolist(), "a load to other pages"
            lock = request.lock
            self.look(lock.tokens, lock.namespace, lock.length, pages, self.elsewhere.device)
        self.requests.remove(request)
        self.cache.loaded(request.load, ok)
        self.check()

    def keep(self, request: Request) -> Lock:
        """Insert what was loaded and goes on to be locked, as after a step."""
        lock = request.lock
        tokens = lock.tokens[: lock.length + lock.promised]
        result = self.extend(lock, tokens, slots=request.slots)
        longer = self.lock_handle(result.handle, tokens, lock.namespace, len(tokens))
        self.unlock(lock)
        return longer

    def let_go(self, slots: NDArray[np.int64]) -> None:
        """Free pages of the caller."""
        own = np.unique(slots // self.page_size)
        self.allocator.free(own)
        self.held.difference_update(own.tolist())

    def poll(self) -> None:
        owned = set(self.allocator.held)
        self.cache.poll()
        assert self.allocator.held == owned, "poll changed the owner of a page"
        self.check()

    def settle(self) -> None:
        """Let everything come to its end."""
        for _ in range(100):
            moved = self.elsewhere.settle()
            self.poll()
            if not moved and not self.cache.busy:
                return
        raise AssertionError("the cache does not come to rest though all that it has begun is done")

    def look(
        self,
        tokens: Sequence[int],
        namespace: str,
        start: int,
        pages: NDArray[np.int64],
        where: Mapping[int, object],
    ) -> None:
        """Look at what pages hold that follow `start` tokens."""
        for index, page in enumerate(pages.tolist()):
            wanted = self.content(tokens, namespace, start + (index + 1) * self.page_size)
            place = "device" if where is self.elsewhere.device else "host"
            assert where.get(page) == wanted, f"the {place}'s page {page} holds {where.get(page)}, not {wanted}"
