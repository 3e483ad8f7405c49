"""What looking for n-grams costs: microseconds per request and step, by length and kind of text.

    python -m benchmarks.ngram [--lengths 2048 32768 131072] [--steps 600] [--shared]

`first` is the call on a prompt that it has never seen, `worst` the longest of those in which it catches up with the
prompt, and the rest are the steps after these, one token each, `learn` included; nothing that is drafted stands, and
there are no pauses. Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.layers import ModelSpec
from pegboard.plugins.spec_ngram.options import NgramOptions
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator
from pegboard.plugins.speculation.api import DraftRow, SpeculatorContext

VOCAB = 49152
CATCHING_UP = 100
"""Steps in which a long prompt is indexed."""


def _quoting(rng: np.random.Generator, length: int) -> NDArray[np.int64]:
    """Return a text whose last quarter is its first."""
    text = rng.integers(0, VOCAB, length)
    text[-(length // 4) :] = text[: length // 4]
    return text


KINDS: dict[str, Callable[[np.random.Generator, int], NDArray[np.int64]]] = {
    "no repetition": lambda rng, length: rng.integers(0, VOCAB, length),
    "like words": lambda rng, length: np.minimum(rng.zipf(1.3, length), VOCAB - 1).astype(np.int64),
    "two tokens": lambda rng, length: rng.integers(0, 2, length),
    "one token": lambda rng, length: np.zeros(length, np.int64),
    "quoting": _quoting,
}


def measure(kind: str, length: int, steps: int, shared: bool) -> tuple[NDArray[np.float64], float]:
    """Return the microseconds of each step, and the share of steps with drafts."""
    text = KINDS[kind](np.random.default_rng(0), length + steps)
    ctx = SpeculatorContext(ModelSpec("toy", VOCAB, 8, 1 << 20, (), ()), 8)
    speculator = NgramSpeculator(NgramOptions(longest_pause=1, shared=shared), ctx)
    memo: dict[object, object] = {}
    taken, drafted = np.empty(steps), 0
    one = np.ones(1, np.int64)
    for step in range(steps):
        rows = [DraftRow(text[: length + step], length, "", 8, memo)]
        begin = time.perf_counter()
        trees = speculator.propose(rows)
        speculator.learn(rows, trees.counts, one)
        taken[step] = time.perf_counter() - begin
        drafted += int(trees.counts[0]) > 1
    return taken * 1e6, drafted / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 32768, 131072])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--shared", action="store_true")
    asked = parser.parse_args()
    print(f"{'tokens':>8} {'text':14} {'first':>7} {'worst':>7} {'median':>7} {'mean':>7} {'p99':>7} {'drafted':>8}")
    for length in asked.lengths:
        for kind in KINDS:
            taken, drafted = measure(kind, length, asked.steps, asked.shared)
            later = taken[CATCHING_UP:]
            figures = (taken[0], taken[:CATCHING_UP].max(), np.median(later), later.mean(), np.percentile(later, 99))
            print(f"{length:8} {kind:14} " + " ".join(f"{one:7.1f}" for one in figures) + f" {drafted:8.2f}")


if __name__ == "__main__":
    main()
