"""The figures of a run, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.tools.bench.records import STOPPED

if TYPE_CHECKING:
    from pegboard.tools.bench.load import Outcome
    from pegboard.tools.bench.records import Record

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
SHOWN_ERRORS = 5


def figures(outcome: Outcome, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return all figures of a run: latencies in milliseconds, rates per second. `slo` has the most milliseconds that a
    request's ttft, tpot or e2e may take for it to count as good.

    Latencies are those of requests that succeeded. Of a rate the time is from the first request's start to the last
    one's end.
    """
    good = [one for one in outcome.records if one.ok]
    failed = [one for one in outcome.records if one.error and one.error != STOPPED]
    seconds = outcome.duration
    inputs = sum(one.input_tokens or 0 for one in good)
    outputs = sum(one.output_tokens for one in good)
    return {
        "requests": outcome.wanted,
        "completed": len(good),
        "failed": len(failed),
        "unfinished": outcome.wanted - len(good) - len(failed),
        "duration_s": seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
        "mean_concurrency": sum(one.end - one.sent for one in outcome.records if one.end) / seconds,
        **_cache_hits(good),
        **_latencies(good),
        "goodput": sum(meets(one, slo) for one in good) / seconds if slo else None,
        "counted": dict(Counter(one.counted for one in good)),
        "finish_reasons": dict(Counter(one.finish_reason for one in good)),
        "errors": _commonest([one.error for one in failed]),
        "stopped": outcome.stopped,
        "client": _client(outcome, outputs),
    }


def _cache_hits(good: Sequence[Record]) -> dict[str, float | None]:
    """Count cached tokens over the requests whose server says how many there were; None where no server does."""
    known = [one for one in good if one.cached_tokens is not None and one.prompt_tokens]
    if not known:
        return {"cached_tokens": None, "hit_rate": None}
    cached = sum(one.cached_tokens or 0 for one in known)
    return {"cached_tokens": cached, "hit_rate": cached / sum(one.prompt_tokens or 0 for one in known)}


def _latencies(good: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """Return the spread of each latency, in milliseconds."""
    return {
        "ttft_ms": spread([one.ttft for one in good]),
        "tpot_ms": spread([one.tpot for one in good if one.tpot is not None]),
        "itl_ms": spread([gap for one in good for gap in one.intervals()]),
        "e2e_ms": spread([one.e2e for one in good]),
    }


def _commonest(errors: Sequence[str]) -> list[dict[str, Any]]:
    return [{"message": message, "count": count} for message, count in Counter(errors).most_common(SHOWN_ERRORS)]


def _client(outcome: Outcome, output_tokens: int) -> dict[str, Any]:
    """Return what the measuring itself cost, and how late its requests left."""
    return {
        "cpu_s": outcome.cpu_seconds,
        "cpu_us_per_token": outcome.cpu_seconds * 1e6 / output_tokens if output_tokens else None,
        "lag_ms": spread([one.sent - one.due for one in outcome.records]),
    }


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Return whether a request was as quick as it should have been; one without further tokens has no TPOT to miss."""
    return all((getattr(record, name) or 0.0) * 1000 <= most for name, most in slo.items())


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (between two values, linearly), the ends and the standard deviation, in milliseconds; None of
    nothing.
    """
    if not seconds:
        return None
    values = np.array(seconds) * 1000
    found = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)},
        "max": float(values.max()),
    }


def median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the runs; what is not a number is the first run's."""
    return {key: _median([run.get(key) for run in runs]) for key in runs[0]}


def _median(values: list[Any]) -> Any:
    if all(isinstance(one, Mapping) for one in values):
        return {key: _median([one.get(key) for one in values]) for key in values[0]}
    numbers = [one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if len(numbers) < len(values):
        return values[0] if not numbers else float(np.median(numbers))
    middle = float(np.median(numbers))
    return int(middle) if all(isinstance(one, int) for one in numbers) and middle.is_integer() else middle
