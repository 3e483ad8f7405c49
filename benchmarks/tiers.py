"""What tiers of KV bring: the time to the first token of known prompts, by where their KV lies.

    python -m benchmarks.tiers                  # the demo model, prompts of 2,048 tokens, medians of 20
    python -m benchmarks.tiers --quick          # to see that it works; figures mean little

Rows: recompute (a cache that keeps nothing), device, host (a working set of four times the device's pool, in turns),
files as a restarted server finds them (in the page cache, and dropped from it), and prompts that are nowhere. Then the
rate of prompts that never come again, with copies written through and without. All engines live in one process, and
what is compared takes turns. Ratios are medians over pairs of neighbouring runs. The device's pool is memory, too: this
is a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.tools.bench.report import machine

MODEL = "demo:smollm2-135m-instruct"
ONE_TOKEN = SamplingParams(temperature=0.0, max_new_tokens=1)
TIMES = 4
"""The working set over the device's pool."""


@dataclass(frozen=True)
class Size:
    """Tokens of a prompt, prompts that fit on the device, and runs of each row."""

    prompt: int
    fits: int
    runs: int


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--directory", type=Path, help="where files are kept; a temporary folder unless given")
    parser.add_argument("--only", choices=["host", "files", "new"], nargs="+", default=["host", "files", "new"])
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
def engine(size: Size, cache: Mapping[str, Any], *, host: int = 0, files: Path | None = None) -> Iterator[Engine]:
    """Run an engine whose device holds `size.fits` prompts, and whose host holds `host` of them."""
    config = {
        "model": {"path": MODEL},
        "log_level": "warning",
        "prefix_cache": dict(cache),
        "memory": {
            "page_size": 16,
            "max_total_tokens": size.fits * (size.prompt + 64),
            "host": {"max_total_tokens": max(1, host) * (size.prompt + 64)},
            "storage": [] if files is None else [{"use": "files", "dir": str(files)}],
        },
        "gates": [] if files is None else ["prefetch"],
    }
    with Engine.from_config(config) as made:
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
        engine(size, {"use": "none"}) as plain,
        engine(size, {"use": "hiradix"}, host=2 * TIMES * size.fits) as tiered,
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


def file_rows(size: Size, prompts: Prompts, directory: Path) -> dict[str, list[float]]:
    """Known prompts after a restart: all that is left of them is in files."""
    rows: dict[str, list[float]] = {"recompute": [], "files": [], "files cold": [], "miss with files": []}
    known = [prompts.new() for _ in range(2 * size.runs + 2)]
    cache, found = {"use": "hiradix"}, 0.0
    with engine(size, cache, host=4 * size.fits, files=directory) as writer:
        for prompt in known:
            first_token(writer, prompt)
            settle(writer)
    with (
        engine(size, {"use": "none"}) as plain,
        engine(size, cache, host=4 * size.fits, files=directory) as restarted,
    ):
        for number in range(size.runs + 1):
            warm, cold = known[2 * number], known[2 * number + 1]
            before = restarted.stats()
            times = {"recompute": first_token(plain, warm), "files": first_token(restarted, warm)}
            drop_from_page_cache(directory)
            times["files cold"] = first_token(restarted, cold)
            after = restarted.stats()
            found += after["cached_storage_tokens"] - before["cached_storage_tokens"]
            times["miss with files"] = first_token(restarted, prompts.new())
            settle(restarted)
            if number:
                for name, seconds in times.items():
                    rows[name].append(seconds)
        share = found / (2 * (size.runs + 1) * size.prompt)
        print(f"of these prompts' tokens files have brought {share:.0%}")
        assert share > 0.5, "the gate has waited too briefly"
        print_stats("files", restarted.stats())
    return rows


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


def new_prompts(size: Size, prompts: Prompts) -> dict[str, Any]:
    """Prompts per second that never come again, with write-through over those with a plain radix tree: once the host's
    memory has been written to, and at first, while the system still has to provide it.
    """
    ratios, rates = [], []
    count = max(4, size.fits)
    new = 2
    with (
        engine(size, {"use": "radix"}) as plain,
        engine(size, {"use": "hiradix"}, host=new * count) as tiered,
    ):
        for number in range(new + max(3, size.runs // 2)):
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
    return {"ratio": spread(ratios[new:]), "at first": spread(ratios[:new]), "prompts_per_s": statistics.median(rates)}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_stats(name: str, stats: Mapping[str, Any]) -> None:
    tiers = {key: round(value, 3) for key, value in stats["tiers"].items() if value}
    print(f"{name}: {json.dumps(tiers)}\n")


def table(rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    lines = ["| where the KV lies | TTFT, ms | against recompute |", "|---|---|---|"]
    base = rows["recompute"]
    for name in names:
        ratio = spread([one / whole for one, whole in zip(rows[name], base, strict=True)])
        took = statistics.median(rows[name]) * 1000
        lines.append(f"| {name} | {took:.1f} | {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) |")
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    size = Size(args.tokens, 2 if args.quick else 4, args.runs)
    prompts = Prompts(size.prompt)
    print(f"{json.dumps(machine())}\n")
    found: dict[str, Any] = {}
    if "host" in args.only:
        found["host"] = rows = host_rows(size, prompts)
        print(table(rows, ("recompute", "device", "host", "miss")), "\n")
    if "files" in args.only:
        with contextlib.ExitStack() as stack:
            directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found["files"] = rows = file_rows(size, prompts, directory)
            found["read"] = read_speed(directory)
        print(table(rows, ("recompute", "files", "files cold", "miss with files")), "\n")
        print(f"plain reads of the files: {json.dumps(found['read'])} GB/s\n")
    if "new" in args.only:
        found["new"] = new_prompts(size, prompts)
        print(f"prompts that never come again, write-through over radix: {json.dumps(found['new'])}")
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
