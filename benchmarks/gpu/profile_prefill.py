"""Where the time to a first token goes, without HTTP: the device's share, and the host's by function.

    python -m benchmarks.gpu.profile_prefill DIRECTORY [--device cpu] [LENGTH ...]

One engine over the checkpoint answers random prompts of each length with one token. Wall is a whole request, busy the
sum of all kernels, span from the first kernel's start to the last one's end: span less busy is what launching leaves
idle, wall less span what comes before and after. FLOPs are those of the matrix products, without attention.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import math
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import make_model
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams

ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
LENGTHS = (8, 128, 512, 1024, 2048, 8192)
SHOWN = 10
"""Kernels that are listed."""


def layer_weights(config: Mapping[str, Any]) -> int:
    """Return how many numbers every token is multiplied by: all matrices but the embeddings and the head."""
    named = (entry for shapes in list(make_model.shards(config))[1:] for entry in shapes.items())
    return sum(math.prod(shape) for name, shape in named if "norm" not in name)


def asking(engine: Engine, length: int) -> Callable[[], object]:
    """Return a call that asks for the token behind a new prompt of `length`, each time another."""
    generator = np.random.default_rng(length)

    def ask() -> object:
        return engine.generate([generator.integers(3, engine.info.vocab_size, length).tolist()], ONE)

    return ask


def kernels(ask: Callable[[], object], times: int) -> tuple[float, float, Counter[str], int]:
    """Return seconds busy and from first to last, microseconds by kernel, and kernels, each of one call."""
    took: Counter[str] = Counter()
    busy, spans, count = 0.0, [], 0
    for _ in range(times):
        with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as seen:
            ask()
        events = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
        for event in events:
            took[event.name] += event.time_range.elapsed_us()
            busy += event.time_range.elapsed_us()
        count += len(events)
        if events:
            spans.append(
                max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
            )
    span = statistics.median(spans) if spans else 0.0
    return (
        busy / times / 1e6,
        span / 1e6,
        Counter({name: micros // times for name, micros in took.items()}),
        count // times,
    )


def report(engine: Engine, length: int, weights: int) -> None:
    """Print one length."""
    ask, walls = asking(engine, length), []
    for _ in range(12):
        start = time.perf_counter()
        ask()
        walls.append(time.perf_counter() - start)
    wall = statistics.median(walls[2:])
    busy, span, took, count = kernels(ask, 3)
    print(
        f"\n{length} tokens: wall {1e3 * wall:.2f} ms, span {1e3 * span:.2f} ms, busy {1e3 * busy:.2f} ms, "
        f"{count} kernels, {length / wall:.0f} tok/s, {2 * weights * length / wall / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    for name, micros in took.most_common(SHOWN):
        print(f"  {micros:9.0f} us  {name[:100]}", flush=True)


def functions(ask: Callable[[], object], shown: int) -> str:
    """Return the host's functions that take longest, over ten calls."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        ask()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("cumulative").print_stats(shown)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Report each length, then the host's functions for the shortest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("lengths", nargs="*", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_intermixed_args(arguments)
    lengths = given.lengths or LENGTHS
    config = {
        "model": {"path": str(given.directory), "device": given.device},
        "scheduler": {"max_running_requests": 8},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 4 * max(lengths)},
    }
    with Engine.from_config(config, overrides=given.set) as engine:
        weights = layer_weights(json.loads((given.directory / "config.json").read_text()))
        for length in lengths:
            report(engine, length, weights)
        print(functions(asking(engine, min(lengths)), 45), flush=True)


if __name__ == "__main__":
    main()
