"""What all tests of prefix caches with tiers start from."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.conformance.prefix_cache.promises import PromiseTests
from pegboard.plugins.kv_tiers.api import Job
from pegboard.plugins.kv_tiers.suite.prefix_tier_books import TierBooks
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandMover


class TierSuite(PromiseTests):
    """Builds a cache over a mover whose jobs wait until the test, or the cache itself, waits for them."""

    contract = "prefix_cache"

    def elsewhere(self, room: int) -> HandMover:
        return self.mover(room)

    def promise_books(self, page_size: int = 1, num_pages: int = 128, *, room: int = 256) -> TierBooks:
        return self.tier_books(page_size, num_pages, host_pages=room)

    def mover(self, host_pages: int, block_pages: int = 1, stores: Sequence[str] = ()) -> HandMover:
        mover = HandMover(host_pages, block_pages, stores)

        def end(jobs: Sequence[Job]) -> None:
            for job in [job for job in mover.jobs if job in jobs]:
                mover.finish(job)

        mover.on_wait = end
        return mover

    def tier_books(
        self,
        page_size: int = 1,
        num_pages: int = 128,
        *,
        host_pages: int = 256,
        block_pages: int = 1,
        stores: Sequence[str] = (),
    ) -> TierBooks:
        return TierBooks(self.build, num_pages, page_size, mover=self.mover(host_pages, block_pages, stores))
