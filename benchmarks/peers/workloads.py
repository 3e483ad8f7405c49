"""What is measured: the workloads of the comparison, as command lines of `pegboard bench serve`, and their targets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2"
"""The name under which every server offers the model."""

RATE_STEP = 2 ** (1 / 6)
"""Between two request rates of the search: 12%."""
HIGHEST_RATE_INDEX = 48
"""128 requests per second: more than any of these servers takes."""


@dataclass(frozen=True)
class Workload:
    """One row of the table. `target` is how many times better than vLLM Pegboard shall be at least."""

    name: str
    title: str
    figure: str
    """Of the load tool's JSON, with dots."""
    target: float
    prompts: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None
    prefix_len: int = 0
    lower_is_better: bool = False
    unit: str = "tok/s"

    def arguments(self, url: str, seed: int, json_file: str) -> list[str]:
        """Behind `pegboard bench serve`. Nothing here depends on who is measured but the URL."""
        words = ["--url", url, "--api", "openai", "--model", MODEL, "--prompt-kind", "tokens", "--seed", str(seed)]
        words += ["--workload", "shared-prefix" if self.prefix_len else "random"]
        if self.prefix_len:
            words += ["--prefix-len", str(self.prefix_len), "--groups", "1"]
        words += ["--num-prompts", str(self.prompts), "--warmup", "1"]
        words += ["--input-len", str(self.input_len), "--output-len", str(self.output_len)]
        if self.concurrency is not None:
            words += ["--concurrency", str(self.concurrency)]
        if self.rate is not None:
            words += ["--request-rate", f"{self.rate:.4g}"]
        return [*words, "--json", json_file]

    def value(self, median: Mapping[str, Any]) -> float:
        """The figure of this row out of the load tool's medians. Raises KeyError where it is not there."""
        found: Any = median
        for part in self.figure.split("."):
            found = found[part]
        return float(found)

    def shorter(self) -> Workload:
        """As few requests as still show anything."""
        return dataclasses.replace(self, prompts=max(self.concurrency or 8, self.prompts // 4))


WORKLOADS = (
    Workload("streams-1", "1 stream, 128 in / 128 out", "output_throughput", 4.0, 5, 128, 128, concurrency=1),
    Workload("streams-8", "8 streams, 128 in / 128 out", "output_throughput", 3.5, 24, 128, 128, concurrency=8),
    Workload("streams-32", "32 streams, 128 in / 128 out", "output_throughput", 2.7, 64, 128, 128, concurrency=32),
    Workload("prefill-32", "32 streams, 512 in / 16 out, all tokens", "total_throughput", 1.9, 64, 512, 16, 32),
    Workload(
        "shared-32", "32 streams, 1024 shared + 64 in / 64 out", "output_throughput", 2.5, 64, 64, 64, concurrency=32,
        prefix_len=1024,
    ),
    Workload(
        "rate-4", "4 requests/s, 256 in / 64 out, median TTFT", "ttft_ms.p50", 2.5, 80, 256, 64, rate=4.0,
        lower_is_better=True, unit="ms",
    ),
)  # fmt: skip

RATE_SEARCH = "max-rate"
TTFT_LIMIT_MS = 1000.0
PROBE_PROMPTS = 100
"""At least so many requests decide on a rate: a p99 of fewer is their maximum."""
PROBE_SECONDS = 15.0
"""And at least so long they come: a short burst shows no queue."""

NAMES = (*(one.name for one in WORKLOADS), RATE_SEARCH)


def probe(rate: float, *, quick: bool = False) -> Workload:
    """The load that decides whether a server bears `rate` requests per second."""
    least, seconds = (20, 4.0) if quick else (PROBE_PROMPTS, PROBE_SECONDS)
    prompts = max(least, math.ceil(seconds * rate))
    return Workload("probe", f"{rate:g} requests/s", "ttft_ms.p99", 0.0, prompts, 256, 64, rate=rate, unit="ms")


def rate_at(index: int) -> float:
    """The grid of request rates, the same for every server."""
    return round(0.5 * RATE_STEP**index, 2)


def index_of(rate: float) -> int:
    """The nearest place in the grid."""
    return min(HIGHEST_RATE_INDEX, max(0, round(math.log(max(rate, 0.01) / 0.5, RATE_STEP))))


def highest_rate(bears: Callable[[float], bool], guess: float, step: int = 3) -> float:
    """The highest rate of the grid that `bears` says yes to, taking it that it says no to all above; 0 if to none.

    Goes up or down from `guess` with growing steps, then halves what is between a yes and a no.
    """
    index, low, high = index_of(guess), -1, HIGHEST_RATE_INDEX + 1
    while high - low > 1:
        if bears(rate_at(index)):
            low = index
        else:
            high = index
        if low >= 0 and high <= HIGHEST_RATE_INDEX:
            index = (low + high) // 2
        elif low >= 0:
            index, step = min(HIGHEST_RATE_INDEX, low + step), 2 * step
        else:
            index, step = max(0, high - step), 2 * step
    return rate_at(low) if low >= 0 else 0.0
