"""Tiers in the lab: the real cache decides, and its mover is one of virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.kv_tiers import KV_STORAGE
from pegboard.plugins.kv_tiers.api import NAME, PageLoad, Tiers
from pegboard.plugins.kv_tiers.sizes import HOST_TIMES, Facts, block_pages, has_tiers
from pegboard.tools.lab.cost import GB
from pegboard.tools.lab.moves import NEVER, Speed, VirtualMover, VirtualStore

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Choice
    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.tools.lab.clock import VirtualClock
    from pegboard.tools.lab.cost import CostModel, TierCost

IDENTITY = b"lab"


class LabTiers:
    """The tiers of one run; `mover` is None where the prefix cache has none."""

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self.mover: VirtualMover | None = None
        self._cost = cost
        self._clock = clock
        self._page_size = 1
        self._block_bytes = 0
        self._load_seconds = 0.0
        self._loaded_tokens = 0

    def build(
        self, resolved: ResolvedConfig, cache: Choice[PrefixCache, PrefixCacheContext], device_pages: int
    ) -> dict[str, object]:
        """Return the services of a cache: what is below its device pages. Raises ConfigError as an engine does, and for
        a cost model that does not say what a tier costs. No storage of the config is touched: a virtual one has its
        place.
        """
        memory: Any = resolved.engine.memory
        cost = self._cost
        facts = Facts(resolved.engine, resolved.said, cache.name, cache.provides, resolved.requiring)
        if not has_tiers(facts):
            return {}
        if cost.kv_token_bytes is None or cost.host is None:
            raise ConfigError(
                f"cost model {cost.name or '(a file)'} does not say what tiers cost (kv_token_bytes, host), and the "
                f"prefix cache {cache.name!r} has some; take cpu-smollm2 or h200-8b, or a file of your own"
            )
        block, wanted = block_pages(facts), memory.host.max_total_tokens
        pages = HOST_TIMES * device_pages if wanted is None else wanted // memory.page_size
        self._page_size = memory.page_size
        page_bytes = cost.kv_token_bytes * memory.page_size
        self._block_bytes = page_bytes * block
        self.mover = VirtualMover(
            max(block, pages), block, _speed(cost.host, page_bytes), self._stores(resolved), self._clock
        )
        return {NAME: Tiers(self.mover, IDENTITY)}

    def load(self, work: ModelWorkerBatch) -> float:
        """Return by how much a batch's loads make it longer. Raises RuntimeError for pages that were never filled."""
        payload = work.payloads.get(NAME)
        if not isinstance(payload, tuple) or not (work.part is None or work.part.first):
            return 0.0
        host = np.concatenate([load.host for load in payload if isinstance(load, PageLoad)])
        if self.mover is None or not self.mover.filled[host].all():
            raise RuntimeError("a prefill loads host pages that nothing was written to")
        tokens = int(host.shape[0]) * self._page_size
        seconds = self._cost.delay(work, tokens)
        self._loaded_tokens += tokens
        self._load_seconds += seconds
        return seconds

    def work_until(self, memory: MemoryManager, until: float) -> None:
        """Take the results of moves as they end, while nothing else is to do, as a server's loop does."""
        mover = self.mover
        while mover is not None and memory.cache.busy and self._clock.now < until:
            before = mover.next_end
            if before < until:
                self._clock.now = max(self._clock.now, before)
            elif before != NEVER:
                break
            mover.advance()
            memory.guarded.poll()
            if before == NEVER == mover.next_end:
                break

    def figures(self) -> dict[str, float] | None:
        """Return bytes that went each way, and the virtual seconds that loads added to steps; None without tiers."""
        if self.mover is None or self._cost.kv_token_bytes is None:
            return None
        token_bytes = self._cost.kv_token_bytes
        moved = self.mover.moved()
        saved = moved.pop("saved_pages") * self._page_size * token_bytes
        return {
            "load_seconds": self._load_seconds,
            "loaded_bytes": float(self._loaded_tokens * token_bytes),
            "saved_bytes": saved,
            **{f"{name}_bytes": blocks * self._block_bytes for name, blocks in moved.items()},
        }

    def _stores(self, resolved: ResolvedConfig) -> list[VirtualStore]:
        stores = []
        for record in resolved.candidates.get(KV_STORAGE.name, ()):
            cost = self._cost.storages.get(record.name)
            if cost is None:
                raise ConfigError(
                    f"cost model {self._cost.name or '(a file)'} does not say how fast the storage {record.name!r} is; "
                    f"say it: --tier {record.name}:read=1.0,write=1.0,latency=0.001 (GB/s and seconds)"
                )
            own = getattr(resolved.options(record), "max_bytes", None)
            room = cost.bytes or own
            blocks = float("inf") if room is None else room // self._block_bytes
            stores.append(VirtualStore(record.name, _speed(cost, self._block_bytes), blocks))
        return stores


def _speed(cost: TierCost, size: int) -> Speed:
    """Return the seconds of units of so many bytes."""
    return Speed(size / (cost.read * GB), size / (cost.write * GB), cost.latency)
