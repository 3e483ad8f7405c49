"""What sampling costs beside the forward pass: the sampler in torch and the native one, on the same logits in one run.

    python benchmarks/sampling.py [--rounds 15] [--threads 2] [--instructions auto]

For each vocabulary, batch size and kind of request the samplers take turns, and the fastest of the rounds counts, so
that other users of the machine matter less; the ratio of the two is what to quote. Logits are normal with a
standard deviation of 3, about what a language model's look like, in bf16's steps. `wide` is a nucleus of thousands of
tokens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.plugins.cpu_native.options import CpuNativeSamplerOptions
from pegboard.plugins.cpu_native.sampler import CpuNativeSampler
from pegboard.plugins.sampler_torch.sampler import TorchSampler

VOCABULARIES = (49_152, 151_936)
BATCHES = (1, 8, 32)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "top_p 0.9, wide": {"temperature": 3.0, "top_p": 0.9},
}


def fastest(rounds: int, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return seconds of the fastest round of each call, in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both samplers")
    parser.add_argument("--instructions", default="auto", help="of the native one: auto, amx, avx512 or avx2")
    arguments = parser.parse_args()
    options = CpuNativeSamplerOptions(threads=arguments.threads, instructions=arguments.instructions)
    torch.set_num_threads(arguments.threads)
    print(f"{'vocabulary':>10} {'rows':>4}  {'request':<22} {'torch ms':>9} {'native ms':>9} {'ratio':>6}")
    for vocab in VOCABULARIES:
        context = SamplerContext(vocab, torch.device("cpu"))
        native = CpuNativeSampler(options, context)
        samplers = (TorchSampler(NoOptions(), context), native)
        for rows in BATCHES:
            logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3
            logits = logits.to(torch.bfloat16).float()
            for kind, row in KINDS.items():
                batch = make_sampling([{**row, "seed": seed} for seed in range(rows)], vocab)
                seconds = fastest(arguments.rounds, [partial(one.sample, logits, batch) for one in samplers])
                show(vocab, rows, kind, seconds)
            batch = make_sampling([{}] * rows, vocab, logprobs=[LogprobRequest(top=5)] * rows)
            tokens = logits.argmax(-1)
            seconds = fastest(arguments.rounds, [partial(one.logprobs, logits, tokens, batch) for one in samplers])
            show(vocab, rows, "logprobs, 5 largest", seconds)


def show(vocab: int, rows: int, kind: str, seconds: list[float]) -> None:
    old, new = (1e3 * one for one in seconds)
    print(f"{vocab:>10} {rows:>4}  {kind:<22} {old:>9.3f} {new:>9.3f} {old / new:>5.1f}x", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
