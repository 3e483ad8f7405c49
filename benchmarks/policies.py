"""What it costs to order a queue of 1,000 waiting requests, of which 32 are admitted per step.

    OMP_NUM_THREADS=1 python benchmarks/policies.py              # every policy, radix at page size 1, block at 16
    OMP_NUM_THREADS=1 python benchmarks/policies.py lpm          # one policy

Two queues: "groups" share 50 system prompts of 1024 tokens, each with 128 of its own; in "chats" each request goes on
with a conversation of 512 to 2048 tokens, of which all but the last 128 were cached some time ago. Milliseconds per
call of `order`, as median and 90th percentile of 60 steps: when nothing has changed since the last call, when the cache
has changed (the 32 that came first are computed and cached, older entries are evicted), and when as many new requests
have arrived besides. The fall-back to fcfs is off.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions
from pegboard.plugins.memory_paged.allocators import StackAllocator
from pegboard.plugins.policy_basic.options import PriorityOptions, SrtfOptions
from pegboard.plugins.policy_basic.policies import FcfsPolicy
from pegboard.plugins.policy_basic.urgency import PriorityPolicy, SrtfPolicy
from pegboard.plugins.policy_cache_aware.options import DfsWeightOptions, LpmOptions
from pegboard.plugins.policy_cache_aware.policies import DfsWeightPolicy, LpmPolicy
from pegboard.toolkit.cache.pages import slots_of

WAITING, ADMITTED, STEPS, WARM_UP = 1000, 32, 60, 20
VOCABULARY = 50_000

POLICIES: dict[str, Callable[[SchedulePolicyContext], SchedulePolicy]] = {
    "fcfs": lambda ctx: FcfsPolicy(NoOptions(), ctx),
    "priority": lambda ctx: PriorityPolicy(PriorityOptions(), ctx),
    "srtf": lambda ctx: SrtfPolicy(SrtfOptions(), ctx),
    "lpm": lambda ctx: LpmPolicy(LpmOptions(fallback_above=None), ctx),
    "dfs-weight": lambda ctx: DfsWeightPolicy(DfsWeightOptions(fallback_above=None), ctx),
}


class Queue:
    """Waiting requests, and a cache of two million tokens that serves them."""

    def __init__(self, policy: str, cache: str, page_size: int, kind: str) -> None:
        self.random = np.random.default_rng(0)
        self.kind = kind
        self.allocator = StackAllocator(NoOptions(), TokenAllocatorContext(3_000_000 // page_size, page_size))
        ctx = PrefixCacheContext(self.allocator, page_size)
        self.cache: PrefixCache = RadixCache(RadixOptions(), ctx) if cache == "radix" else BlockCache(NoOptions(), ctx)
        self.policy = POLICIES[policy](SchedulePolicyContext(self.cache))
        self.systems = [self._tokens(1024) for _ in range(50)]
        self.waiting: list[Req] = []
        self.arrived = 0
        self.arrive(WAITING)

    def arrive(self, count: int) -> None:
        for _ in range(count):
            if self.kind == "groups":
                stem = self.systems[self.random.integers(0, len(self.systems))]
            else:
                stem = self._tokens(int(self.random.integers(384, 1920)))
                self._compute(stem)
            prompt = np.concatenate([stem, self._tokens(128)])
            sampling = SamplingParams(max_new_tokens=int(self.random.integers(1, 500)))
            level = int(self.random.integers(0, 3))
            self.waiting.append(Req(str(self.arrived), prompt, sampling, priority=level))
            self.arrived += 1

    def admit(self, order: list[Req]) -> None:
        """Compute and cache the first ones; the oldest entries go."""
        first = order[:ADMITTED]
        gone = set(map(id, first))
        self.waiting = [req for req in self.waiting if id(req) not in gone]
        for req in first:
            self._compute(req.prompt_ids)
        self.cache.evict(2048)

    def timed(self) -> tuple[float, list[Req]]:
        start = time.perf_counter()
        order = self.policy.order(self.waiting, [])
        return 1000 * (time.perf_counter() - start), order

    def _compute(self, tokens: NDArray[np.int64]) -> None:
        req = Req("", tokens, SamplingParams(max_new_tokens=1))
        pages = self.allocator.alloc(-(-tokens.shape[0] // self.cache.page_size))
        if pages is None:
            self.cache.evict(100_000)
            return self._compute(tokens)
        slots = slots_of(pages, self.cache.page_size)[: tokens.shape[0]]
        result = self.cache.insert(req.key(), slots)
        if tokens.shape[0] % self.cache.page_size:
            self.allocator.free(pages[-1:])
        assert result.taken == tokens.shape[0] // self.cache.page_size * self.cache.page_size
        return None

    def _tokens(self, count: int) -> NDArray[np.int64]:
        return self.random.integers(0, VOCABULARY, count)


def measure(queue: Queue) -> list[list[float]]:
    unchanged: list[float] = []
    changed: list[float] = []
    arrived: list[float] = []
    for step in range(WARM_UP + STEPS):
        took, order = queue.timed()
        again = queue.timed()[0]
        queue.admit(order)
        after = queue.timed()[0]
        queue.arrive(ADMITTED)
        if step >= WARM_UP:
            arrived.append(took)
            unchanged.append(again)
            changed.append(after)
    return [unchanged, changed, arrived]


def main() -> None:
    chosen = sys.argv[1:] or list(POLICIES)
    print(f"{'ms per order() of ' + str(WAITING):24}{'unchanged':>16}{'cache changed':>16}{'and newcomers':>16}")
    for name in chosen:
        aware = name in ("lpm", "dfs-weight")
        for cache, page_size in (("radix", 1), ("block", 16)) if aware else (("radix", 1),):
            for kind in ("groups", "chats") if aware else ("groups",):
                columns = measure(Queue(name, cache, page_size, kind))
                figures = [f"{statistics.median(one):.2f} {statistics.quantiles(one, n=10)[-1]:.2f}" for one in columns]
                label = f"{name} {cache} {kind}" if aware else name
                print(f"{label:24}" + "".join(f"{one:>16}" for one in figures))


if __name__ == "__main__":
    main()
