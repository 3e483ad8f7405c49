"""Where a decode step's time goes on the device: kernels by name, busy time, and what the host leaves idle.

    python -m benchmarks.gpu.profile_step [--dry-run] [REQUESTS ...]

Over the 8B-shaped model of `benchmarks.gpu.bench`, with random KV. Busy is the sum of all kernels, which do not overlap
on one stream; wall is the time of a step with one launched ahead.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, Model
from benchmarks.gpu.make_model import CONFIGS

SHOWN = 14
"""Kernels that are listed, those that take longest."""


def profiled(bench: Bench, model: Model, count: int, steps: int) -> tuple[Counter[str], Counter[str]]:
    """Return the microseconds and the calls of `steps` steps, by kernel."""
    took: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA]) as seen:
        for step in model.in_turns(count, steps - 1):
            step.result()
        bench.synchronize()
    for event in seen.events() or ():
        if bench.dry or event.device_type == DeviceType.CUDA:
            took[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    return took, calls


def report(bench: Bench, model: Model, count: int, bandwidth: float) -> None:
    """Print a step of so many requests."""
    wall, steps = model.step_seconds(count, bench.either(60, 3)), bench.either(10, 2)
    took, calls = profiled(bench, model, count, steps)
    busy = sum(took.values()) / steps / 1e6
    roof = (model.weight_bytes + count * model.context * model.kv_bytes) / bandwidth
    idle = max(0.0, 1 - busy / wall)
    print(
        f"\n{count} requests: wall {1e3 * wall:.3f} ms, busy {1e3 * busy:.3f} ms, idle {idle:.1%}, "
        f"roof {1e3 * roof:.3f} ms, share {roof / wall:.2f}, {sum(calls.values()) / steps:.0f} kernels a step",
        flush=True,
    )
    for name, micros in took.most_common(SHOWN):
        each = micros / calls[name]
        print(f"  {micros / steps:9.1f} us  {calls[name] / steps:6.1f} x {each:8.2f} us  {name[:100]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile steps of 1, 8 and 64 requests, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", nargs="*", type=int)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--shape", choices=CONFIGS, default="llama-8b")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    bench = Bench(given.dry_run)
    counts = given.requests or bench.either([1, 8, 64], [1, 8])
    with torch.inference_mode():
        shape = bench.either(CONFIGS[given.shape], {})
        model = Model(bench, max(counts), bench.either(given.context, 60), config=shape)
        print(f"bandwidth of a copy: {bench.bandwidth() / 1e9:.0f} GB/s", flush=True)
        for count in counts:
            report(bench, model, count, bench.bandwidth())


if __name__ == "__main__":
    main()
