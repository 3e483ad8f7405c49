"""What is measured: the workloads of the comparison, as command lines of `pegboard bench serve`, and their targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2"
"""The name under which every server offers the model."""


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
        """Return the arguments of `pegboard bench serve`. Only the URL depends on what is measured."""
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
        """Return the figure of this row out of the load tool's medians. Raises KeyError where it is not there."""
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
BOUND = "ttft:p99:1000"
"""What the highest rate must keep to: p99 of TTFT under a second."""
TRIAL_PROMPTS = 100
"""At least so many requests decide on a rate: a p99 of fewer is their maximum."""
TRIAL_SECONDS = 15.0
"""And at least so long they come: a short burst shows no queue."""
PRECISION = 0.08
TRIALS = 5
"""About so many rates are tried by one search, of which those that are too high end early."""

NAMES = (*(one.name for one in WORKLOADS), RATE_SEARCH)


def search_arguments(url: str, seed: int, guess: float, json_file: str, *, quick: bool = False) -> list[str]:
    """Behind `pegboard bench serve`, to find the highest rate of 256 in / 64 out."""
    one = Workload(RATE_SEARCH, "", "", 0.0, 20 if quick else TRIAL_PROMPTS, 256, 64, rate=guess)
    seconds = 4.0 if quick else TRIAL_SECONDS
    more = ["--find-rate", BOUND, "--trial-seconds", f"{seconds:g}", "--precision", str(0.3 if quick else PRECISION)]
    return [*one.arguments(url, seed, json_file), *more]


def search_seconds(guess: float, *, quick: bool = False) -> float:
    """About how long the search takes around `guess` requests per second."""
    least, seconds = (20, 4.0) if quick else (TRIAL_PROMPTS, TRIAL_SECONDS)
    return TRIALS * (max(least / guess, seconds) + 3)
