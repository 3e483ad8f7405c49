"""What planning FlashInfer's arrays costs the host at each step.

``python -m benchmarks.planning [--requests 256] [--tokens 8192] [--longer 65536] [--rounds 400]``: page counts, indptr
and last page lengths of a decode batch, as often as a model with three kinds of layers needs them: all that was said, a
sliding window, and a KV group of its own. What FlashInfer does with them is not part of it, nor are page indices, which
are gathered on the device. Batches of both lengths are planned in turns; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_flashinfer.planning import Kind, Lens, choose, first_keys, indptr, list_pages

PAGE_SIZE = 16
WINDOW = 4096


def kinds() -> list[Kind]:
    """Return three kinds of layers."""
    layers = [LayerSpec(0, 32, 8, 128, 128, 128**-0.5), LayerSpec(1, 32, 8, 128, 128, 128**-0.5, window=WINDOW)]
    layers.append(LayerSpec(2, 32, 8, 128, 128, 128**-0.5, kv_group=1))
    return [Kind.of(layer) for layer in layers]


def batch(requests: int, tokens: int) -> Lens:
    """Return a decode batch of requests of about so many tokens."""
    seq = np.random.default_rng(0).integers(tokens - tokens // 8, tokens + 1, requests)
    return Lens(seq, np.ones_like(seq), np.zeros_like(seq), treed=False)


def plan(lens: Lens, wanted: list[Kind]) -> None:
    """Plan a batch for all kinds of layers."""
    indptr(lens.new)
    for kind in wanted:
        choose(kind, lens, cascade=False, itemsize=2)
        list_pages(lens.seq, first_keys(lens, kind.window), PAGE_SIZE)


def measure(requests: int, tokens: tuple[int, int], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of a step for both lengths."""
    wanted, batches = kinds(), [batch(requests, length) for length in tokens]
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for lens, times in zip(batches, found, strict=True):
            start = time.perf_counter()
            plan(lens, wanted)
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--longer", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    short, long = measure(args.requests, (args.tokens, args.longer), args.rounds)
    print(f"{args.requests} requests, {len(kinds())} kinds of layers, pages of {PAGE_SIZE}")
    print(f"  {args.tokens:>7,} tokens: {short:.3f} ms a step (goal: 0.3)")
    print(f"  {args.longer:>7,} tokens: {long:.3f} ms, {long / short:.2f} times that (goal: 1.1)")


if __name__ == "__main__":
    main()
