"""What the scheduler costs between two forward passes: the model is replaced by one that answers at once.

    OMP_NUM_THREADS=1 python benchmarks/scheduler.py             # the figures
    OMP_NUM_THREADS=1 python benchmarks/scheduler.py --profile   # and cProfile's top entries of the decode steps

A decode step is everything between two forward passes: the loop's messages, batch building, memory and cache books,
result handling with finish checks, one step hook of each kind, and the outputs encoded for the wire. Every running
request streams and stops at its end-of-sequence token. Medians over the steps, with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.config.sections import SchedulerSection
from pegboard.core.frontend.intake import pack_ids
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import FromScheduler, TokenizedBatch, TokenizedRequest, TokenOutputs, ToScheduler
from pegboard.core.interfaces.prefix_cache import PrefixCacheContext
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components, Limits, StepHooks
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.system.wire import encode

VOCAB = 50_000
EOS = 2


class InstantModel:
    """Answers every batch at once, and counts the time it took itself out of the figures."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.entered = 0.0
        self.left = 0.0

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self.entered = time.perf_counter()
        n = 0 if work.sampling is None else len(work.sampling.steps)
        tokens: NDArray[np.int64] = self.random.integers(10, VOCAB, n)
        self.left = time.perf_counter()
        return BatchResult(tokens)


class Bench:
    """A scheduler with the real components, filled as asked."""

    def __init__(
        self,
        *,
        policy: str,
        page_size: int,
        running: int,
        tokens: int,
        cache: str = "radix",
        committed: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        registry = Registry.discover(())
        pages = tokens // page_size
        config = SchedulerSection(max_running_requests=running, max_prefill_tokens=1 << 30)
        allocator = provider(registry, "token_allocator", "stack", TokenAllocatorContext(pages, page_size))
        prefix_cache = provider(registry, "prefix_cache", cache, PrefixCacheContext(allocator, page_size))
        options = {"fallback_above": None} if policy in ("lpm", "dfs-weight") else {}
        chosen = provider(registry, "schedule_policy", policy, SchedulePolicyContext(prefix_cache, 0), options)
        rows = ReqToTokenPool(running, 16384, page_size)
        memory = MemoryManager(rows, allocator, prefix_cache)
        self.model = InstantModel()
        seen: list[int] = []
        watch: tuple[Callable[..., Any], ...] = (lambda batch: seen.append(1) if not batch else None,)
        hooks = StepHooks(batch_scheduled=watch, batch_committed=watch + committed, requests_finished=watch)
        components = Components(
            memory,
            chosen,
            BatchBuilder(memory, (), VOCAB),
            ResultProcessor(None, {EOS}),
            LocalExecutor(lambda work: Done(self.model(work))),
            hooks=hooks,
        )
        self.scheduler = Scheduler(config, components, Limits(16384, eos_ids=frozenset({EOS})))
        self.random = np.random.default_rng(1)
        self._count = 0

    def submit(self, prompts: Sequence[NDArray[np.int64]], *, new_tokens: int = 8192) -> None:
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
        requests = []
        for prompt in prompts:
            self._count += 1
            requests.append(
                TokenizedRequest(rid=f"r{self._count}", prompt=pack_ids(prompt.tolist()), sampling=params, stream=True)
            )
        self.scheduler.receive([TokenizedBatch(requests=requests)])

    def prompts(self, n: int, length: int) -> list[NDArray[np.int64]]:
        return [self.random.integers(10, VOCAB, length) for _ in range(n)]

    def step(self, *arrived: ToScheduler) -> float:
        """Take one turn of the loop; return the seconds it took outside of the model."""
        start = time.perf_counter()
        messages: list[FromScheduler] = self.scheduler.receive(list(arrived))
        outputs = self.scheduler.step()
        messages.append(TokenOutputs(outputs=outputs))
        for message in messages:
            encode(message)
        return time.perf_counter() - start - (self.model.left - self.model.entered)

    def fill(self, running: int, length: int) -> None:
        self.submit(self.prompts(running, length))
        for _ in range(4):
            self.step()
        assert len(self.scheduler.running) == running, len(self.scheduler.running)


def provider(registry: Registry, contract: str, name: str, ctx: Any, options: dict[str, Any] | None = None) -> Any:
    record = registry.get(contract, name)
    assert record is not None
    return record.load()(record.options_model()(**(options or {})), ctx)


def spread(times: Sequence[float]) -> str:
    low, middle, high = np.percentile(np.array(times) * 1000, [10, 50, 90])
    return f"{middle:7.3f} ms  ({low:.3f} .. {high:.3f})"


def decode_steps(
    running: int, waiting: int, length: int, page_size: int, policy: str = "fcfs", steps: int = 400
) -> tuple[Bench, list[float]]:
    room = running * (length + 16384) + 1_000_000
    bench = Bench(policy=policy, page_size=page_size, running=running, tokens=room // page_size * page_size)
    bench.fill(running, length)
    if waiting:
        bench.submit(bench.prompts(waiting, 512))
    for _ in range(50):
        bench.step()
    return bench, [bench.step() for _ in range(steps)]


def admission(policy: str, waiting: int, admitted: int, page_size: int, steps: int = 40) -> list[float]:
    """Time steps that admit `admitted` of `waiting` requests which share 50 system prompts. Before each step the
    requests admitted before have ended, which changes the cache, and as many new ones have arrived.
    """
    bench = Bench(policy=policy, page_size=page_size, running=admitted, tokens=4_000_000)
    shared = bench.prompts(50, 1024)

    def arrive(count: int) -> None:
        own = bench.prompts(count, 128)
        stems = bench.random.integers(0, len(shared), count)
        bench.submit([np.concatenate([shared[i], one]) for i, one in zip(stems, own, strict=True)], new_tokens=3)

    arrive(waiting)
    found = []
    while len(found) < steps:
        before = len(bench.scheduler.waiting)
        took = bench.step()
        if (left := before - len(bench.scheduler.waiting)) > 0:
            assert left == admitted
            found.append(took)
            arrive(admitted)
    return found[steps // 4 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print cProfile's top entries of decode steps")
    parser.add_argument("--quick", action="store_true", help="only the decode step at 256 and 1,000 waiting")
    args = parser.parse_args()
    for page_size in (1, 16):
        _, times = decode_steps(256, 1000, 2000, page_size)
        print(f"decode step, 256 running of 2,000 tokens, 1,000 waiting, page size {page_size:2}: {spread(times)}")
    if args.profile:
        bench, _ = decode_steps(256, 1000, 2000, 1, steps=1)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(400):
            bench.step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    if args.quick:
        return
    for running in (16, 64, 256, 512):
        _, times = decode_steps(running, 0, 500, 1)
        print(f"decode step, {running:4} running of   500 tokens: {spread(times)}")
    for length in (500, 2000, 8000):
        _, times = decode_steps(64, 0, length, 1)
        print(f"decode step,   64 running of {length:5} tokens: {spread(times)}")
    for policy in ("fcfs", "lpm"):
        for page_size in (1, 16):
            took = admission(policy, 1000, 32, page_size)
            print(f"step that admits 32 of 1,000 waiting, {policy:4}, page size {page_size:2}: {spread(took)}")


if __name__ == "__main__":
    main()
