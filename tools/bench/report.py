"""What is shown and written of a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pegboard.tools.bench.figures import LATENCIES

FORMAT = 1
"""Of the JSON files; raised where a figure changes its meaning or its name."""

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "between two tokens",
    "e2e": "whole answer",
}


def totals(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield rows about the run as a whole."""
    done = f"{found['completed']:g} of {found['requests']:g}"
    if found["failed"]:
        done += f", {found['failed']:g} failed"
    yield "requests", done
    yield "duration", f"{found['duration_s']:.2f} s"
    yield "input tokens", f"{found['input_tokens']:g}"
    yield "output tokens", f"{found['output_tokens']:g}"
    yield "requests/s", f"{found['request_throughput']:.2f}"
    if found.get("goodput") is not None:
        yield "requests/s that met the SLO", f"{found['goodput']:.2f}"
    yield "input tok/s", f"{found['input_throughput']:.1f}"
    yield "output tok/s", f"{found['output_throughput']:.1f}"
    yield "total tok/s", f"{found['total_throughput']:.1f}"
    if found["hit_rate"] is not None:
        yield "prefix hit rate", f"{found['hit_rate']:.1%}"
    yield "requests under way, mean", f"{found['mean_concurrency']:.1f}"


def latencies(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of times."""
    rows = []
    for name in LATENCIES:
        values = found[f"{name}_ms"]
        if values is not None:
            rows.append((f"{name.upper()} ({_NAMES[name]})", *(_ms(values[column]) for column in _COLUMNS)))
    return ("ms", *_COLUMNS), rows


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def plain(value: Any) -> Any:
    """As JSON has it: no infinities, floats of a sensible length, mappings and sequences as they are."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else round(value, 6)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(one) for one in value]
    return value


def machine() -> dict[str, Any]:
    """Return where this was measured."""
    import os
    import platform

    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.uname().system, "processor": name or platform.processor(), "cores": cores}
