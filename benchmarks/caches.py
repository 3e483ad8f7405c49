"""What the prefix caches cost on the host, with a 32k-token prompt among about a million cached tokens.

    OMP_NUM_THREADS=1 python benchmarks/caches.py            # radix at page size 1, block at 16, all figures
    OMP_NUM_THREADS=1 python benchmarks/caches.py radix:16   # one cache at one page size

The million is 30 prompts of 16k to 32k tokens and about 1000 of 32 to 512 that share 20 system prompts. Each
figure is the median of 21 runs, in milliseconds; what an insert adds is evicted from elsewhere after it. "Fork"
prompts leave a cached one halfway; "deep" is a cached prompt with 64 forks on its way. Eviction is measured for 4096
tokens at a time, with more and more in the cache, in many small entries and in few long ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.core.toolkit.pages import slots_of
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions
from pegboard.plugins.memory_paged.allocators import StackAllocator

LENGTH = 32_768
RUNS = 21
VOCABULARY = 50_000

Tokens = NDArray[np.int64]


class Bench:
    """A cache over an allocator with room for two million tokens."""

    def __init__(self, name: str, page_size: int) -> None:
        self.page_size = page_size
        self.random = np.random.default_rng(0)
        self.allocator = StackAllocator(NoOptions(), TokenAllocatorContext(2_000_000 // page_size, page_size))
        ctx = PrefixCacheContext(self.allocator, page_size)
        self.cache: PrefixCache = RadixCache(RadixOptions(), ctx) if name == "radix" else BlockCache(NoOptions(), ctx)

    def prompt(self, length: int = LENGTH) -> Tokens:
        return self.random.integers(0, VOCABULARY, length)

    def slots(self, length: int) -> Tokens:
        pages = self.allocator.alloc(-(-length // self.page_size))
        assert pages is not None
        return slots_of(pages, self.page_size)[:length]

    def insert(self, tokens: Tokens) -> None:
        """Insert, and give the partial page back."""
        result = self.cache.insert(PrefixKey(tokens), self.slots(tokens.shape[0]))
        if result.taken < tokens.shape[0]:
            self.allocator.free(result.slots[-1:] // self.page_size)

    def fill(self) -> None:
        for length in self.random.integers(LENGTH // 2, LENGTH, 30):
            self.insert(self.prompt(int(length)))
        systems = [self.prompt(500) for _ in range(20)]
        while self.cache.cached_tokens < 1_000_000:
            system = systems[self.random.integers(20)]
            self.insert(np.concatenate((system, self.prompt(int(self.random.integers(32, 512))))))


@contextmanager
def clock(times: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times.append((time.perf_counter() - start) * 1e3)


def median(run: Callable[[list[float]], None]) -> float:
    times: list[float] = []
    for _ in range(RUNS):
        run(times)
    return statistics.median(times)


def show(what: str, milliseconds: float) -> None:
    print(f"  {what:<44}{milliseconds:9.3f} ms")


def measure(name: str, page_size: int) -> None:
    bench = Bench(name, page_size)
    bench.fill()
    cache = bench.cache
    print(f"{name}, page size {page_size}, {cache.cached_tokens} tokens cached")

    def insert_new(times: list[float]) -> None:
        key, slots = PrefixKey(bench.prompt()), bench.slots(LENGTH)
        with clock(times):
            cache.insert(key, slots)
        cache.evict(LENGTH)

    def insert_again(times: list[float]) -> None:
        key = PrefixKey(known)
        slots = bench.slots(LENGTH)
        with clock(times):
            cache.insert(key, slots)

    def insert_fork(times: list[float]) -> None:
        tokens = known.copy()
        tokens[LENGTH // 2 :] = bench.prompt(LENGTH // 2)
        slots = np.concatenate((cache.match(PrefixKey(known)).slots[: LENGTH // 2], bench.slots(LENGTH // 2)))
        with clock(times):
            cache.insert(PrefixKey(tokens), slots)
        cache.evict(LENGTH // 2)

    def match(tokens: Tokens) -> Callable[[list[float]], None]:
        def run(times: list[float]) -> None:
            key = PrefixKey(tokens)
            with clock(times):
                found = cache.match(key)
            assert len(found) >= LENGTH // 2

        return run

    def lock_and_unlock(times: list[float]) -> None:
        handle = cache.match(PrefixKey(known)).handle
        with clock(times):
            cache.lock(handle)
            cache.unlock(handle)

    show("insert 32k, new", median(insert_new))
    known = bench.prompt()
    bench.insert(known)
    show("insert 32k, all of it duplicates", median(insert_again))
    show("insert 32k, fork halfway", median(insert_fork))
    bench.insert(known)
    show("match 32k", median(match(known)))
    fork = known.copy()
    fork[LENGTH // 2 :] = 1
    show("match 32k, fork halfway", median(match(fork)))
    for end in range(512, LENGTH, 512):
        bench.insert(np.concatenate((known[:end], bench.prompt(64))))
    show("match 32k, deep", median(match(known)))
    show("lock and unlock 32k, deep", median(lock_and_unlock))
    deep = known.copy()
    deep[-512:] = 1
    show("match 32k, deep, fork at the end", median(match(deep)))


def measure_eviction(name: str, page_size: int) -> None:
    print(f"{name}, page size {page_size}, evicting 4096 tokens")
    for entry in (64, 8192):
        for cached in (50_000, 200_000, 800_000):
            bench = Bench(name, page_size)
            for _ in range(cached // entry):
                bench.insert(bench.prompt(entry))
            times: list[float] = []
            for _ in range(RUNS):
                if bench.cache.evictable_tokens < cached:
                    for _ in range(max(1, 4096 // entry)):
                        bench.insert(bench.prompt(entry))
                with clock(times):
                    bench.cache.evict(4096)
            show(f"{cached} cached in entries of {entry}", statistics.median(times))


def main(choices: list[str]) -> None:
    for choice in choices or ["radix:1", "block:16"]:
        name, _, page_size = choice.partition(":")
        if name not in ("radix", "block") or not page_size.isdigit():
            sys.exit(f"{choice!r}: say radix:PAGE_SIZE or block:PAGE_SIZE")
        measure(name, int(page_size))
        measure_eviction(name, int(page_size))


if __name__ == "__main__":
    main(sys.argv[1:])
