"""A mixture of experts on a CPU: the native runner beside torch, which multiplies expert by expert.

    python -m benchmarks.experts [--model DIR] [--prompts 128 512] [--streams 1 8] [--output 32] [--rounds 7]
        [--set KEY=VALUE]

Without --model a Qwen3-MoE of 0.5 billion random parameters is made once, in Pegboard's cache. Both runners take turns
in one process. Printed are medians of tokens per second, and of the ratio of neighbouring runs with the lowest and the
highest: in wall time, and in CPU seconds of the process, which count what other programs on the machine do less.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.decode import measure
from pegboard.core.engine.engine import Engine
from pegboard.toolkit.system.cache_dir import default_cache_dir

SHAPE = "qwen3-moe-0.5b"
RUNNERS = {"native": "cpu_native", "torch": "layered"}


def main() -> None:
    args = arguments()
    path = args.model or made(default_cache_dir() / "experts")
    native, torch = (engine(path, runner, args.overrides) for runner in RUNNERS.values())
    rng = random.Random(0)
    with native, torch:
        for length in args.prompts:
            compare(f"prompt of {length}", (native, torch), args.rounds, length, functools.partial(prompt, rng=rng))
        for streams in args.streams:
            run = functools.partial(decode, streams=streams, rng=rng)
            compare(f"decode, {streams} streams", (native, torch), args.rounds, streams * args.output, run)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    return parser.parse_args()


def made(cache: Path) -> Path:
    """Return the checkpoint, made once."""
    target = cache / SHAPE
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"draft.{SHAPE}")
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.make_model", SHAPE, str(draft)], check=True)
        draft.rename(target)
    return target


def engine(path: Path, runner: str, overrides: list[str]) -> Engine:
    words = [f"model.path={path}", "model.dtype=bfloat16", f"runner.use={runner}", "memory.max_total_tokens=4096"]
    return Engine.from_config({}, "examples/quickstart.yaml", overrides=[*words, *overrides])


def prompt(one: Engine, length: int, rng: random.Random) -> float:
    """Return seconds to the first token of a prompt."""
    return measure(one, 1, length, 1, rng)["wall s"]


def decode(one: Engine, tokens: int, streams: int, rng: random.Random) -> float:
    """Return seconds of so many tokens, of all streams together, after short prompts."""
    return measure(one, streams, 4, tokens // streams, rng)["wall s"]


def compare(
    title: str, engines: tuple[Engine, Engine], rounds: int, tokens: int, run: Callable[[Engine, int], float]
) -> None:
    """Print what the first of two engines does beside the second."""
    walls: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for place, one in enumerate(engines):
            before = time.process_time()
            wall = run(one, tokens)
            if turn:  # the first warms up
                walls[place].append(wall)
                seconds[place].append(time.process_time() - before)
    rates = [tokens / statistics.median(one) for one in walls]
    print(
        f"{title}: native {rates[0]:.0f} tok/s, torch {rates[1]:.0f}; ratio {ratio(walls)}; of CPU seconds "
        f"{ratio(seconds)}",
        flush=True,
    )


def ratio(columns: list[list[float]]) -> str:
    """Return the median, the lowest and the highest ratio of the second column to the first."""
    found = sorted(second / first for first, second in zip(*columns, strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


if __name__ == "__main__":
    main()
