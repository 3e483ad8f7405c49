"""Figures of a run: latencies, throughput, hit rate, fairness. Plain values, for the table, JSON and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.tools.lab.cost import GB
from pegboard.tools.lab.run import BUCKETS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.tools.lab.run import Outcome, Record

PERCENTILES = (50, 95, 99)
NOTABLE = 0.001
"""Hit rates below it are first tokens that happen to be equal."""


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Return all figures of a run. Times in seconds of virtual time.

    TTFT is from arrival to first token, TPOT the mean time per further token of a request, ITL the time between two
    tokens, queue time from arrival until it was first scheduled. The hit rate is the share of all prompt tokens that
    were found in the cache when a request was first scheduled; `hit_rate_of_optimal` relates it to what an infinite
    cache would have found, coming one by one.
    """
    done = [record for record in outcome.records if record.finished > 0]
    prompts = sum(record.prompt_len for record in done)
    outputs = sum(record.output_len for record in done)
    span = max(outcome.duration, 1e-9)
    queued = [r.scheduled - r.arrived for r in done if r.scheduled > 0]
    return {
        "label": outcome.label,
        "requests": len(outcome.records),
        "finished": len(done),
        "rejected": outcome.rejected,
        "duration": outcome.duration,
        "output_tokens_per_s": outputs / span,
        "total_tokens_per_s": (prompts + outputs) / span,
        "requests_per_s": len(done) / span,
        "ttft": _spread([r.first_token - r.arrived for r in done if r.first_token > 0]),
        "tpot": _spread([(r.finished - r.first_token) / (r.output_len - 1) for r in done if r.output_len > 1]),
        "itl": _from_histogram(outcome.intervals),
        "e2e": _spread([r.finished - r.arrived for r in done]),
        "queue": _spread(queued),
        **_hit_rates(outcome, done, prompts),
        "retractions": outcome.retractions,
        "preemptions": outcome.preemptions,
        "prefill_steps": outcome.prefill_steps,
        "decode_steps": outcome.decode_steps,
        "fallback_share": _fallback_share(outcome.policy),
        "fairness": fairness(done),
        "max_queue": max(queued, default=0.0),
        "book_errors": outcome.info.get("book_errors", 0),
        **_encoding(outcome),
        **({} if outcome.accept_length is None else {"accept_length": outcome.accept_length}),
        "wall": outcome.wall,
    }


def _encoding(outcome: Outcome) -> dict[str, float]:
    """Return how much was encoded, the share of pieces that were there already, and the share of all time that it took;
    nothing for a workload without media.
    """
    found = outcome.encoding
    if found is None:
        return {}
    wanted = max(1, found["encoded_pieces"] + found["encoder_hits"])
    return {
        "encode_steps": found["encode_steps"],
        "encoded_pieces": found["encoded_pieces"],
        "encoder_hit_rate": found["encoder_hits"] / wanted,
        "encode_share": found["encode_time"] / max(outcome.duration, 1e-9),
    }


def _hit_rates(outcome: Outcome, done: Sequence[Record], prompt_tokens: int) -> dict[str, float | None]:
    """Return the hit rate, the best possible one, and the share of it; None where the best is unknown or nothing. Then
    what there is to say of tiers.
    """
    total = max(1, prompt_tokens)
    rate = outcome.cached_tokens / total
    optimal = None if outcome.optimal_cached is None else outcome.optimal_cached / total
    return {
        "hit_rate": rate,
        "optimal_hit_rate": optimal,
        "hit_rate_of_optimal": rate / optimal if optimal is not None and optimal >= NOTABLE else None,
        **_tiers(outcome, done, prompt_tokens),
    }


def _tiers(outcome: Outcome, done: Sequence[Record], prompt_tokens: int) -> dict[str, float]:
    """Return which share of all prompt tokens was found where, and which was computed; the share of all time that loads
    made steps longer; and GB that were moved, by direction. Nothing for a prefix cache without tiers.
    """
    if outcome.tiers is None:
        return {}
    total = max(1, prompt_tokens)
    host, storage = sum(one.cached_host for one in done), sum(one.cached_storage for one in done)
    cached = sum(one.cached for one in done)
    moved = {key.replace("_bytes", "_gb"): value / GB for key, value in outcome.tiers.items() if "_bytes" in key}
    return {
        "hit_rate_device": (cached - host - storage) / total,
        "hit_rate_host": host / total,
        "hit_rate_storage": storage / total,
        "computed_share": 1 - cached / total,
        "load_share": outcome.tiers["load_seconds"] / max(outcome.duration, 1e-9),
        **moved,
    }


def fairness(records: Sequence[Record]) -> float:
    """Jain's index over groups: (sum x)^2 / (n sum x^2) of the groups' mean end-to-end times per token. 1 where all
    groups are served alike, 1/n where one waits for all (Jain, Chiu and Hawe, 1984).
    """
    per_group: dict[str, list[float]] = defaultdict(list)
    for record in records:
        per_group[record.group].append((record.finished - record.arrived) / max(1, record.output_len))
    means = np.array([np.mean(times) for times in per_group.values()])
    return float(means.sum() ** 2 / (len(means) * (means**2).sum())) if means.size and means.any() else 1.0


def _fallback_share(stats: dict[str, float]) -> float | None:
    steps = stats.get("steps", 0)
    return stats["fallback_steps"] / steps if steps and "fallback_steps" in stats else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}, "max": 0.0}
    array = np.array(values)
    found = np.percentile(array, PERCENTILES)
    return {
        "mean": float(array.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)},
        "max": float(array.max()),
    }


def _from_histogram(counts: NDArray[np.int64]) -> dict[str, float]:
    """Percentiles to the width of a bucket."""
    total = int(counts.sum())
    if not total:
        return {f"p{p}": 0.0 for p in PERCENTILES}
    upto = np.cumsum(counts)
    edges = np.append(BUCKETS, BUCKETS[-1])
    return {f"p{p}": float(edges[int(np.searchsorted(upto, total * p / 100))]) for p in PERCENTILES}


ROWS: tuple[tuple[str, str], ...] = (
    ("requests finished", "finished"),
    ("duration, s (virtual)", "duration"),
    ("output tokens/s", "output_tokens_per_s"),
    ("TTFT p50 / p95 / p99, s", "ttft"),
    ("TPOT p50 / p95 / p99, ms", "tpot"),
    ("ITL p50 / p95 / p99, ms", "itl"),
    ("e2e p50 / p95 / p99, s", "e2e"),
    ("queue p50 / p95 / p99, s", "queue"),
    ("longest queue time, s", "max_queue"),
    ("hit rate", "hit_rate"),
    ("... of the optimal one", "hit_rate_of_optimal"),
    ("hits on the device", "hit_rate_device"),
    ("hits on the host", "hit_rate_host"),
    ("hits in storages", "hit_rate_storage"),
    ("computed", "computed_share"),
    ("loaded from the host, GB", "loaded_gb"),
    ("time added by loads", "load_share"),
    ("steps in fall-back", "fallback_share"),
    ("steps that encode", "encode_steps"),
    ("pieces encoded", "encoded_pieces"),
    ("encoder cache, hit rate", "encoder_hit_rate"),
    ("time spent encoding", "encode_share"),
    ("accept length", "accept_length"),
    ("retractions", "retractions"),
    ("preemptions", "preemptions"),
    ("fairness (Jain)", "fairness"),
    ("wall clock, s", "wall"),
)
TIERS = {"hit_rate_device": "device", "hit_rate_host": "host", "hit_rate_storage": "storage"}
"""Figures of a run with tiers, with the tiers that they are of."""
_SHARES = frozenset(
    {
        *("hit_rate", "hit_rate_of_optimal", "fallback_share", "encoder_hit_rate", "encode_share"),
        *(*TIERS, "computed_share", "load_share"),
    }
)
_MILLISECONDS = frozenset({"tpot", "itl"})


def table(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of text, one column per run; none for figures that no run has."""
    rows = [(title, key) for title, key in ROWS if any(key in one for one in summaries)]
    return [(title, *(_text(key, one.get(key)) for one in summaries)) for title, key in rows]


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        scale = 1000 if key in _MILLISECONDS else 1
        return " / ".join(f"{value[f'p{p}'] * scale:.3g}" for p in PERCENTILES)
    if key in _SHARES:
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
