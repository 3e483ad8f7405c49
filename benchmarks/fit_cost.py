"""Fits the lab's cost model to this machine: measures real forward passes of the demo model, and prints YAML.

    python benchmarks/fit_cost.py > tools/lab/costs/cpu-smollm2.yaml

Batches of many shapes (prefills of one and several prompts, behind prefixes, and decode steps of several sizes and
contexts) run through the engine's own worker; the medians of five runs each are fitted by non-negative least squares on
relative errors. The fit's own error goes to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import UTC, datetime

import numpy as np
import yaml

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.executor import Done

RUNS = 5
SHAPES = [(1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (4, 64), (8, 32), (2, 256)]
"""Prefills: requests, and new tokens of each."""
DECODES = [
    (1, 64),
    (1, 512),
    (1, 1024),
    (4, 128),
    (4, 768),
    (8, 64),
    (8, 512),
    (16, 128),
    (16, 384),
    (32, 64),
    (32, 256),
]
"""Decode steps: requests, and the context of each."""


class Timed:
    """The worker's `run`, with a note of what each batch was and how long it took."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine.built.worker.run
        self.seen: list[tuple[ModelWorkerBatch, float]] = []

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        start = time.perf_counter()
        result = self._run(work)
        self.seen.append((work, time.perf_counter() - start))
        return result


def features(work: ModelWorkerBatch) -> list[float]:
    """Return what CostModel.seconds sums up, in its order: 1, tokens, context, pairs, requests."""
    new, context = work.extend_lens, work.seq_lens
    tokens = float(new.sum())
    pairs = float(np.dot(new, context - (new - 1) / 2)) if tokens > len(new) else float(context.sum())
    return [1.0, tokens, float(context.sum()), pairs, float(len(new))]


def measure(engine: Engine) -> tuple[list[list[float]], list[float]]:
    timed = Timed(engine)
    engine.built.scheduler.components.executor._launch = lambda work: Done(timed(work))  # type: ignore[attr-defined]
    draw = np.random.default_rng(0)
    rows: dict[tuple[float, ...], list[float]] = {}
    for count, length, decode in [(*one, False) for one in SHAPES] + [(*one, True) for one in DECODES]:
        for _ in range(RUNS if not decode else 2):
            engine.flush_cache()
            timed.seen.clear()
            prompts = [draw.integers(10, 40_000, length).tolist() for _ in range(count)]
            engine.generate(
                prompts, SamplingParams(max_new_tokens=6 if decode else 1, temperature=0.0, ignore_eos=True)
            )
            for work, took in timed.seen:
                if work.forward_mode.is_decode == decode:
                    rows.setdefault(tuple(features(work)), []).append(took)
    engine.built.scheduler.receive([AbortRequest(all_requests=True)])
    return [list(key) for key in rows], [statistics.median(times) for times in rows.values()]


def fit(rows: list[list[float]], times: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients >= 0 that minimise the relative error, by projected gradient on scaled columns. A pass costs the
    larger of `base` and `per_token` x tokens, so decode steps (few tokens) tell the first and prefills the second.
    """
    a, t = np.array(rows), np.array(times)
    small = a[:, 1] <= 8
    best: tuple[float, np.ndarray] | None = None
    for base in np.linspace(0.5, 1.0, 26) * t[small].min():
        for per_token in np.geomspace(0.05, 1.5, 60) * np.median(t[~small] / a[~small, 1]):
            fixed = np.maximum(base, per_token * a[:, 1])
            rest = non_negative((a[:, 2:] / t[:, None]), (t - fixed) / t)
            error = float(np.abs((fixed + a[:, 2:] @ rest) / t - 1).mean())
            if best is None or error < best[0]:
                best = (error, np.concatenate([[base, per_token], rest]))
    assert best is not None
    found = best[1]
    predicted = np.maximum(found[0], found[1] * a[:, 1]) + a[:, 2:] @ found[2:]
    return found, predicted / t - 1


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with all coefficients >= 0: leave out what would be negative, the worst first."""
    keep = list(range(a.shape[1]))
    while keep:
        scale = np.abs(a[:, keep]).max(axis=0)
        found = np.linalg.lstsq(a[:, keep] / scale, b, rcond=None)[0] / scale
        if (found >= 0).all():
            out = np.zeros(a.shape[1])
            out[keep] = found
            return out
        keep.pop(int(found.argmin()))
    return np.zeros(a.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:smollm2-135m-instruct")
    parser.add_argument("--name", default="cpu-smollm2")
    args = parser.parse_args()
    memory = {"max_total_tokens": 16_384}
    config = {"model": {"path": args.model}, "memory": memory, "scheduler": {"chunked_prefill_size": 0}}
    with Engine.from_config(config) as engine:
        engine.generate("warm up", SamplingParams(max_new_tokens=4))
        rows, times = measure(engine)
    found, errors = fit(rows, times)
    sys.stderr.write(
        f"{len(rows)} shapes; error of the fit: mean {np.abs(errors).mean():.1%}, worst {np.abs(errors).max():.1%}\n"
    )
    names = ("base", "per_token", "per_context_token", "per_pair", "per_request")
    when = datetime.now(UTC).date().isoformat()
    model = {"name": args.name, "source": f"benchmarks/fit_cost.py, {args.model}, {when}"}
    values = {name: float(f"{value:.4g}") for name, value in zip(names, found.tolist(), strict=True)}
    sys.stdout.write(yaml.safe_dump({**model, **values, "overhead": 0.0005}, sort_keys=False))


if __name__ == "__main__":
    main()
