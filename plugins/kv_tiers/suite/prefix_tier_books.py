"""A caller of a prefix cache with tiers, which also looks at what the host holds while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pegboard.conformance.prefix_cache.books import key_of
from pegboard.conformance.prefix_cache.promise_books import PromiseBooks
from pegboard.core.interfaces.keys import PrefixMemo
from pegboard.plugins.kv_tiers.api import PageLoad, Prefetch, Prefetching
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandJob, HandMover

if TYPE_CHECKING:
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext


class TierBooks(PromiseBooks):
    """Books of a cache whose pages a HandMover moves."""

    def __init__(
        self,
        build: Callable[[PrefixCacheContext], PrefixCache],
        num_pages: int = 64,
        page_size: int = 1,
        *,
        mover: HandMover,
    ) -> None:
        super().__init__(build, num_pages, page_size, elsewhere=mover)
        self.mover = mover

    def finish(self, job: HandJob, result: int | None = None, error: str = "") -> None:
        self.mover.finish(job, result, error)

    def prefetch(self, tokens: Sequence[int], namespace: str = "", *, memo: PrefixMemo | None = None) -> Prefetch:
        owned = set(self.allocator.held)
        assert isinstance(self.cache, Prefetching), "a cache with the capability prefetch has this method"
        found = self.cache.prefetch(key_of(tokens, namespace, memo))
        assert self.allocator.held == owned, "prefetch changed the owner of a page"
        self.check()
        return found

    def check(self) -> None:
        super().check()
        for request in self.requests:
            lock, load = request.lock, request.load
            assert isinstance(load, PageLoad), f"{load!r} is not what the device part of tiers takes"
            assert load.host.shape == load.device.shape, f"{load.host.shape} host pages for {load.device.shape} pages"
            self.look(lock.tokens, lock.namespace, lock.length, load.host, self.mover.host)
