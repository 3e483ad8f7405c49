"""What tiers of KV bring: the time to the first token of known prompts, by where their KV lies.

    python -m benchmarks.tiers                  # the demo model, prompts of 2,048 tokens, medians of 20
    python -m benchmarks.tiers --quick          # to see that it works; figures mean little
    python -m benchmarks.tiers --model PATH     # another model, of at least 40,000 token ids

Rows: recompute (a cache that keeps nothing), device, host (a working set of four times the device's pool, in turns),
files as a restarted server finds them (in the page cache, and dropped from it), Redis on loopback where redis-server is
installed, and prompts that are nowhere. Then the rate of prompts that never come again, with copies written through and
without, and what a load costs before and beside the step that reads it. All engines live in one process, with their
memory prepared as a server's, and what is compared takes turns. Ratios are medians over pairs of neighbouring runs. The
device's pool is memory, too: this is a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.kv_tiers.build import LocalTiers
from pegboard.tools.bench.report import machine

MODEL = "demo:smollm2-135m-instruct"
ONE_TOKEN = SamplingParams(temperature=0.0, max_new_tokens=1)
TIMES = 4
"""The working set over the device's pool."""
PARTS = ("host", "files", "redis", "new", "beside")


@dataclass(frozen=True)
class Size:
    """Tokens of a prompt, prompts that fit on the device, runs of each row, and the model."""

    prompt: int
    fits: int
    runs: int
    model: str = MODEL


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a folder or a name, as in a config")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--directory", type=Path, help="where files are kept; a temporary folder unless given")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(words)
    if args.quick:
        args.runs, args.tokens = 2, 320
    return args


class Prompts:
    """Prompts of random tokens, none like another."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length = length
        self._random = np.random.default_rng(seed)

    def new(self) -> list[int]:
        return [int(token) for token in self._random.integers(100, 40_000, self.length)]


@contextlib.contextmanager
def engine(
    size: Size,
    cache: str,
    *,
    host: int = 0,
    storage: Mapping[str, Any] | None = None,
    prepared: bool = True,
) -> Iterator[Engine]:
    """Run an engine whose device holds `size.fits` prompts, and whose host holds `host` of them."""
    config = {
        "model": {"path": size.model},
        "log_level": "warning",
        "prefix_cache": {"use": cache},
        "memory": {
            "page_size": 16,
            "max_total_tokens": size.fits * (size.prompt + 64),
            "host": {"max_total_tokens": max(1, host) * (size.prompt + 64)},
            "storage": [] if storage is None else [dict(storage)],
        },
        "gates": [] if storage is None else ["prefetch"],
    }
    with Engine.from_config(config) as made:
        if prepared:
            made.built.prepare_memory(60.0)
        yield made


def first_token(made: Engine, prompt: list[int]) -> float:
    """Seconds to the first token."""
    start = time.perf_counter()
    made.generate([prompt], ONE_TOKEN)
    return time.perf_counter() - start


def settle(made: Engine, seconds: float = 60.0) -> None:
    """Wait until nothing is copied or written any more."""
    scheduler = made.built.scheduler
    end = time.monotonic() + seconds
    while scheduler.busy and time.monotonic() < end:
        scheduler.step()
        time.sleep(0.002)


def host_rows(size: Size, prompts: Prompts) -> dict[str, list[float]]:
    """Known prompts on the device and on the host, and unknown ones, beside an engine that keeps nothing."""
    rows: dict[str, list[float]] = {"recompute": [], "device": [], "host": [], "miss": []}
    known = [prompts.new() for _ in range(TIMES * size.fits)]
    with (
        engine(size, "none") as plain,
        engine(size, "hiradix", host=2 * TIMES * size.fits) as tiered,
    ):
        for prompt in known:
            first_token(tiered, prompt)
            settle(tiered)
        for number in range(size.runs + 1):
            prompt = known[number % len(known)]
            before = tiered.stats()
            times = {"recompute": first_token(plain, prompt), "host": first_token(tiered, prompt)}
            after = tiered.stats()
            assert after["cached_host_tokens"] - before["cached_host_tokens"] > size.prompt // 2
            times["device"] = first_token(tiered, prompt)
            times["miss"] = first_token(tiered, prompts.new())
            settle(tiered)
            if number:
                for name, seconds in times.items():
                    rows[name].append(seconds)
        print_stats("host", tiered.stats())
    return rows


def stored_rows(
    size: Size, prompts: Prompts, storage: Mapping[str, Any], forget: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Known prompts after a restart: all that is left of them is in the storage. Where it can `forget` what it has in
    memory, a row is for that.
    """
    name = str(storage["use"])
    cold_name = f"{name} cold"
    rows: dict[str, list[float]] = {one: [] for one in ("recompute", name, cold_name, f"miss with {name}")}
    known = [prompts.new() for _ in range(2 * size.runs + 2)]
    found, wanted = 0.0, 0
    with engine(size, "hiradix", host=4 * size.fits, storage=storage) as writer:
        for prompt in known:
            first_token(writer, prompt)
            settle(writer)
    with (
        engine(size, "none") as plain,
        engine(size, "hiradix", host=4 * size.fits, storage=storage) as restarted,
    ):
        for number in range(size.runs + 1):
            warm, cold = known[2 * number], known[2 * number + 1]
            before = restarted.stats()
            times = {"recompute": first_token(plain, warm), name: first_token(restarted, warm)}
            wanted += size.prompt
            if forget is not None:
                forget()
                times[cold_name] = first_token(restarted, cold)
                wanted += size.prompt
            found += restarted.stats()["cached_storage_tokens"] - before["cached_storage_tokens"]
            times[f"miss with {name}"] = first_token(restarted, prompts.new())
            settle(restarted)
            if number:
                for row, seconds in times.items():
                    rows[row].append(seconds)
        print(f"of these prompts' tokens {name} has brought {found / wanted:.0%}")
        assert found > wanted / 2, "the gate has waited too briefly"
        print_stats(name, restarted.stats())
    return {row: seconds for row, seconds in rows.items() if seconds}


def drop_from_page_cache(directory: Path) -> None:
    """Have the system forget the files' content, as far as it listens."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def read_speed(directory: Path) -> dict[str, float]:
    """GB/s of plain reads of the files, in the page cache and dropped from it."""
    files = [file for file in directory.rglob("*") if file.is_file()][:200]
    found = {}
    for name in ("page cache", "cold"):
        if name == "cold":
            drop_from_page_cache(directory)
        start = time.perf_counter()
        total = sum(len(file.read_bytes()) for file in files)
        found[name] = total / (time.perf_counter() - start) / 1e9
    return found


@contextlib.contextmanager
def redis_server() -> Iterator[int | None]:
    """Run a redis-server on a port of loopback; None where none is installed."""
    program = shutil.which("redis-server", path=str(Path(sys.executable).parent)) or shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        words = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


def get_speed(port: int) -> float:
    """GB/s of a plain client that gets block after block."""
    import redis

    with redis.Redis(port=port) as client:
        keys = [key for key, _ in zip(client.scan_iter(), range(200), strict=False)]
        start = time.perf_counter()
        total = sum(len(client.get(key) or b"") for key in keys)
        return total / (time.perf_counter() - start) / 1e9


def new_prompts(size: Size, prompts: Prompts, *, prepared: bool) -> dict[str, Any]:
    """Prompts per second that never come again, with write-through over those with a plain radix tree. With memory that
    is not `prepared` only as long as the host's is new, and the system still has to provide it.
    """
    ratios, rates = [], []
    count = max(4, size.fits)
    rounds = max(3, size.runs // 2) if prepared else 2
    with (
        engine(size, "radix") as plain,
        engine(size, "hiradix", host=2 * count, prepared=prepared) as tiered,
    ):
        for number in range(rounds):
            batch = [prompts.new() for _ in range(count)]
            seconds = {}
            for name in sorted(("plain", "tiered"), reverse=bool(number % 2)):
                made = plain if name == "plain" else tiered
                start = time.perf_counter()
                made.generate(batch, SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True))
                seconds[name] = time.perf_counter() - start
            settle(tiered)
            ratios.append(seconds["plain"] / seconds["tiered"])
            rates.append(count / seconds["tiered"])
    return {"ratio": spread(ratios), "prompts_per_s": statistics.median(rates)}


def beside(size: Size, prompts: Prompts) -> dict[str, list[float]]:
    """Time a prompt that is on the device, with as many pages as it has loaded from the host: not at all, before its
    step, and beside it in another thread. The last one is the most that a runner would gain by waiting for each layer.
    """
    rows: dict[str, list[float]] = {"step": [], "load, then step": [], "load beside step": []}
    with engine(size, "hiradix", host=2 * size.fits) as made:
        prompt = prompts.new()
        first_token(made, prompt)
        settle(made)
        cache, pool = made.built.scheduler.components.memory.cache, made.built.pool
        assert isinstance(cache, HiRadixCache)
        tiers = cache.tiers
        assert isinstance(tiers, LocalTiers)
        count, pages = size.prompt // 16, pool.num_slots // 16
        # The prompt has the first pages; the last ones are free.
        there, here = torch.arange(1, count + 1), torch.arange(pages - count, pages)

        def load() -> None:
            for layer_id in pool.layer_ids:
                tiers.host.load(pool, layer_id, there, here)

        for number in range(2 * size.runs + 1):
            times = {"step": first_token(made, prompt)}
            start = time.perf_counter()
            load()
            first_token(made, prompt)
            times["load, then step"] = time.perf_counter() - start
            start = time.perf_counter()
            thread = threading.Thread(target=load)
            thread.start()
            first_token(made, prompt)
            thread.join()
            times["load beside step"] = time.perf_counter() - start
            if number:
                for name, seconds in times.items():
                    rows[name].append(seconds)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_stats(name: str, stats: Mapping[str, Any]) -> None:
    tiers = {key: round(value, 3) for key, value in stats["tiers"].items() if value}
    print(f"{name}: {json.dumps(tiers)}\n")


def table(rows: Mapping[str, Sequence[float]], base: str = "recompute") -> str:
    lines = [f"| where the KV lies | TTFT, ms | against {base} |", "|---|---|---|"]
    for name, times in rows.items():
        ratio = spread([one / whole for one, whole in zip(times, rows[base], strict=True)])
        took = statistics.median(times) * 1000
        lines.append(f"| {name} | {took:.1f} | {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    size = Size(args.tokens, 2 if args.quick else 4, args.runs, args.model)
    prompts = Prompts(size.prompt)
    print(f"{json.dumps(machine())}\n")
    found: dict[str, Any] = {}
    if "host" in args.only:
        found["host"] = host_rows(size, prompts)
        print(table(found["host"]))
    if "files" in args.only:
        with contextlib.ExitStack() as stack:
            directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            storage = {"use": "files", "dir": str(directory)}
            found["files"] = stored_rows(size, prompts, storage, lambda: drop_from_page_cache(directory))
            found["read"] = read_speed(directory)
        print(table(found["files"]))
        print(f"plain reads of the files: {json.dumps(found['read'])} GB/s\n")
    if "redis" in args.only:
        with redis_server() as port:
            if port is None:
                print("redis-server is not installed\n")
            else:
                found["redis"] = stored_rows(size, prompts, {"use": "redis", "url": f"redis://127.0.0.1:{port}/0"})
                found["get"] = get_speed(port)
                print(table(found["redis"]))
                print(f"a plain client's gets: {found['get']:.2f} GB/s\n")
    if "new" in args.only:
        found["new"] = new_prompts(size, prompts, prepared=True)
        print(f"prompts that never come again, write-through over radix: {json.dumps(found['new'])}")
        found["at first"] = new_prompts(size, prompts, prepared=False)
        print(f"the same while the host's memory is new: {json.dumps(found['at first'])}\n")
    if "beside" in args.only:
        found["beside"] = beside(size, prompts)
        print(table(found["beside"], "load, then step"))
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
