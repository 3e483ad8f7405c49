"""What the prefix caches cost on the host, with a 32k-token prompt among about a million cached tokens.

    OMP_NUM_THREADS=1 python benchmarks/caches.py            # radix at page size 1, block at 16, all figures
    OMP_NUM_THREADS=1 python benchmarks/caches.py radix:16   # one cache at one page size
    OMP_NUM_THREADS=1 python benchmarks/caches.py hiradix:1  # among two million more on the host

The million is 30 prompts of 16k to 32k tokens and about 1000 of 32 to 512 that share 20 system prompts. Each
figure is the median of 21 runs, and the fastest of them, in milliseconds; "memory" compares and copies 32k int64 with
numpy in the same process, to tell a slow machine from a slow cache. What an insert adds is evicted from elsewhere after
it. "Fork" prompts leave a cached one halfway; "deep" is a cached prompt with 63 forks on its way, matched for the first
time after all forks were used, and again. "Chunk" brings 512 tokens behind 32k that a request has locked: by `extend`,
and by `insert` of the whole. Keys carry a memo where a request's would; hashes are counted by wrapping the block
cache's digest in a run of its own. Eviction is measured for 4096 tokens at a time, with more and more in the cache, in
many small entries and in few long ones; then once after every entry was used since the last eviction.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.keys import PrefixKey, PrefixMemo
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.plugins.cache_block.blocks import BlockTable
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.cache_hiradix.options import HiRadixOptions
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.cache_radix.options import RadixOptions
from pegboard.plugins.kv_tiers.api import Job
from pegboard.plugins.memory_paged.allocators import StackAllocator
from pegboard.toolkit.cache.pages import slots_of

LENGTH = 32_768
CHUNK = 512
RUNS = 21
VOCABULARY = 50_000

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Moved:
    """A job that was over when it began."""

    result: int
    done: bool = True
    error: str = ""


class IdleMover:
    """A PageMover that moves nothing: for what the books cost."""

    block_pages = 64
    stores: tuple[str, ...] = ()

    def __init__(self, host_pages: int) -> None:
        self.host_pages = host_pages

    def save(self, device: Tokens, host: Tokens) -> Moved:
        return Moved(device.shape[0])

    def store(self, store: int, keys: Sequence[bytes], host: Tokens) -> Moved:
        return Moved(len(keys))

    def find(self, keys: Sequence[bytes]) -> Moved:
        return Moved(0)

    def fetch(self, keys: Sequence[bytes], host: Tokens) -> Moved:
        return Moved(0)

    def cancel(self, job: Job) -> None:
        pass

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        return True


class Bench:
    """A cache over an allocator with room for two million tokens."""

    def __init__(self, name: str, page_size: int) -> None:
        self.page_size = page_size
        self.random = np.random.default_rng(0)
        self.allocator = StackAllocator(NoOptions(), TokenAllocatorContext(2_000_000 // page_size, page_size))
        self.cache: PrefixCache
        if name == "hiradix":
            mover = IdleMover(3_500_000 // page_size)
            ctx = PrefixCacheContext(self.allocator, page_size, mover)
            self.cache = HiRadixCache(HiRadixOptions(), ctx)
        else:
            ctx = PrefixCacheContext(self.allocator, page_size)
            self.cache = RadixCache(RadixOptions(), ctx) if name == "radix" else BlockCache(NoOptions(), ctx)

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


def measured(run: Callable[[list[float]], None]) -> list[float]:
    times: list[float] = []
    for _ in range(RUNS):
        run(times)
    return times


def show(what: str, times: list[float]) -> None:
    print(f"  {what:<48}{statistics.median(times):9.3f} ms{min(times):9.3f}")


def measure_memory() -> None:
    """Measure the memory that the machine needs for the least that a cache could do."""
    random = np.random.default_rng(0)
    one = random.integers(0, VOCABULARY, LENGTH)
    other = one.copy()

    def compare(times: list[float]) -> None:
        with clock(times):
            assert (one == other).all()

    def copy(times: list[float]) -> None:
        with clock(times):
            one.copy()

    print(f"memory                                              {'median':>9}   {'fastest':>9}")
    show("compare 32k int64", measured(compare))
    show("copy 32k int64", measured(copy))


def measure(name: str, page_size: int) -> None:
    bench = Bench(name, page_size)
    bench.fill()
    cache = bench.cache
    print(f"{name}, page size {page_size}, {cache.cached_tokens} tokens cached")

    def insert_new(times: list[float]) -> None:
        key, slots = PrefixKey(bench.prompt(), "", PrefixMemo()), bench.slots(LENGTH)
        cache.match(key)  # when it arrived
        with clock(times):
            cache.insert(key, slots)
        cache.evict(LENGTH)

    def insert_anew(times: list[float]) -> None:
        """Insert as a retracted request does whose KV was evicted. Empties the cache."""
        key, slots = PrefixKey(bench.prompt(), "", PrefixMemo()), bench.slots(LENGTH)
        cache.insert(key, slots)
        cache.evict(cache.evictable_tokens)
        slots = bench.slots(LENGTH)
        with clock(times):
            cache.insert(key, slots)

    def insert_again(times: list[float]) -> None:
        key = PrefixKey(known, "", PrefixMemo())
        slots = bench.slots(LENGTH)
        with clock(times):
            cache.insert(key, slots)

    def insert_fork(times: list[float]) -> None:
        tokens = known.copy()
        tokens[LENGTH // 2 :] = bench.prompt(LENGTH // 2)
        slots = np.concatenate((cache.match(PrefixKey(known)).slots[: LENGTH // 2], bench.slots(LENGTH // 2)))
        with clock(times):
            cache.insert(PrefixKey(tokens, "", PrefixMemo()), slots)
        cache.evict(LENGTH // 2)

    def match(tokens: Tokens) -> Callable[[list[float]], None]:
        def run(times: list[float]) -> None:
            key = PrefixKey(tokens)
            with clock(times):
                found = cache.match(key)
            assert len(found) >= LENGTH // 2

        return run

    def match_after_forks(times: list[float]) -> None:
        for fork in reversed(forks):
            cache.match(PrefixKey(fork))
        match(known)(times)

    def lock_and_unlock(times: list[float]) -> None:
        handle = cache.match(PrefixKey(known)).handle
        with clock(times):
            cache.lock(handle)
            cache.unlock(handle)

    def chunk(extend: bool) -> Callable[[list[float]], None]:
        def run(times: list[float]) -> None:
            key = PrefixKey(np.concatenate((known, bench.prompt(CHUNK))), "", PrefixMemo())
            path, slots = cache.match(key), bench.slots(CHUNK)
            cache.lock(path.handle)
            with clock(times):
                if extend:
                    cache.extend(path.handle, key, slots)
                else:
                    cache.insert(key, np.concatenate((path.slots, slots)))
            cache.unlock(path.handle)
            cache.evict(CHUNK)

        return run

    show("insert 32k, new", measured(insert_new))
    known = bench.prompt()
    bench.insert(known)
    show("insert 32k, all of it duplicates", measured(insert_again))
    show("insert 32k, fork halfway", measured(insert_fork))
    bench.insert(known)
    show("match 32k", measured(match(known)))
    fork = known.copy()
    fork[LENGTH // 2 :] = 1
    show("match 32k, fork halfway", measured(match(fork)))
    show("chunk of 512 behind 32k, extend", measured(chunk(extend=True)))
    show("chunk of 512 behind 32k, insert", measured(chunk(extend=False)))
    forks = [np.concatenate((known[:end], bench.prompt(64))) for end in range(512, LENGTH, 512)]
    for fork in forks:
        bench.insert(fork)
    show("match 32k, deep, after its forks", measured(match_after_forks))
    show("match 32k, deep", measured(match(known)))
    show("lock and unlock 32k, deep", measured(lock_and_unlock))
    deep = known.copy()
    deep[-512:] = 1
    show("match 32k, deep, fork at the end", measured(match(deep)))
    show("chunk of 512 behind 32k, deep, extend", measured(chunk(extend=True)))
    show("insert 32k, evicted since its last insert", measured(insert_anew))


def measure_tiers(page_size: int) -> None:
    """Measure what goes to the host and comes back, among a million tokens on the device and two million there."""
    bench = Bench("hiradix", page_size)
    cache = bench.cache
    old = [bench.prompt() for _ in range(RUNS)]
    for tokens in old:
        bench.insert(tokens)
    for _ in range(2):
        bench.fill()
        cache.poll()
        cache.evict(1_000_000)
    bench.fill()
    cache.poll()
    stats = cache.stats()
    host = stats["host_tokens"] - cache.cached_tokens
    print(f"hiradix, page size {page_size}, {cache.cached_tokens} tokens on the device, {host:.0f} more on the host")

    def insert_new(times: list[float]) -> None:
        key, slots = PrefixKey(bench.prompt(), "", PrefixMemo()), bench.slots(LENGTH)
        cache.match(key)
        with clock(times):
            cache.insert(key, slots)
        with clock(polls):
            cache.poll()
        cache.evict(LENGTH)

    def match_host(times: list[float]) -> None:
        known = old.pop()
        with clock(times):
            found = cache.match(PrefixKey(known))
        assert (len(found), found.promised) == (0, LENGTH)
        slots = bench.slots(LENGTH)
        with clock(loads):
            cache.lock(found.handle)
            load = cache.load(found.handle, slots)
            cache.loaded(load, True)
        with clock(revivals):
            cache.extend(found.handle, PrefixKey(known), slots)
        cache.unlock(found.handle)
        with clock(idle):
            cache.poll()
        with clock(hits):
            cache.match(PrefixKey(known))

    polls: list[float] = []
    loads: list[float] = []
    revivals: list[float] = []
    idle: list[float] = []
    hits: list[float] = []
    show("insert 32k, new, and begin to save it", measured(insert_new))
    show("poll as its copies arrive", polls)
    show("match 32k on the host", measured(match_host))
    show("lock, load and end the load", loads)
    show("insert 32k that were loaded", revivals)
    show("poll, nothing new", idle)
    show("match 32k on both", hits)


def count_hashes() -> None:
    """How often a request's blocks are hashed in a life of 64 chunks."""
    bench = Bench("block", 16)
    hashed = 0
    digest = BlockTable.digest

    def counting(data: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return digest(data)

    BlockTable.digest = staticmethod(counting)  # type: ignore[method-assign, assignment]
    try:
        tokens, memo, cache = bench.prompt(), PrefixMemo(), bench.cache
        for _ in range(100):
            path = cache.match(PrefixKey(tokens, "", memo))
        cache.lock(path.handle)
        handle = path.handle
        for end in range(CHUNK, LENGTH + 1, CHUNK):
            longer = cache.extend(handle, PrefixKey(tokens[:end], "", memo), bench.slots(CHUNK)).handle
            cache.lock(longer)
            cache.unlock(handle)
            handle = longer
        cache.unlock(handle)
        cache.evict(LENGTH)
        cache.insert(PrefixKey(tokens, "", memo), bench.slots(LENGTH))
    finally:
        BlockTable.digest = staticmethod(digest)  # type: ignore[method-assign]
    print(f"block, page size 16: {hashed} hashes for {LENGTH // 16} blocks, matched 100 times, inserted in 64 chunks,")
    print("  evicted and inserted again")


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
            show(f"{cached} cached in entries of {entry}", times)
    for cached in (50_000, 200_000, 800_000):
        bench = Bench(name, page_size)
        keys = [PrefixKey(bench.prompt(64)) for _ in range(cached // 64)]
        for key in keys:
            bench.insert(key.tokens)
        times = []
        for _ in range(5):
            for key in keys:
                bench.cache.match(key)
            with clock(times):
                bench.cache.evict(4096)
            keys = keys[64:]
        show(f"{cached} cached, each entry used since", times)


def main(choices: list[str]) -> None:
    measure_memory()
    for choice in choices or ["radix:1", "block:16"]:
        name, _, page_size = choice.partition(":")
        if name not in ("radix", "block", "hiradix") or not page_size.isdigit():
            sys.exit(f"{choice!r}: say radix:PAGE_SIZE, block:PAGE_SIZE or hiradix:PAGE_SIZE")
        if name == "hiradix":
            measure_tiers(int(page_size))
            continue
        measure(name, int(page_size))
        measure_eviction(name, int(page_size))
        if name == "block":
            count_hashes()


if __name__ == "__main__":
    main(sys.argv[1:])
