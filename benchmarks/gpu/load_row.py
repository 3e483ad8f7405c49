"""One line of what `pegboard bench serve --json FILE` found: `python benchmarks/gpu/load_row.py FILE NAME STREAMS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def line(found: dict[str, Any], name: str, streams: str) -> str:
    """Return throughput and latencies; what is missing is nan."""

    def milliseconds(key: str, quantile: str) -> float:
        value = (found.get(key) or {}).get(quantile)
        return float("nan") if value is None else float(value)

    return (
        f"{name:>16} {streams:>4} streams: out {found['output_throughput']:8.0f} tok/s, "
        f"in {found['input_throughput']:8.0f} tok/s, TTFT p50 {milliseconds('ttft_ms', 'p50'):7.1f} "
        f"p99 {milliseconds('ttft_ms', 'p99'):7.1f} ms, TPOT p50 {milliseconds('tpot_ms', 'p50'):6.2f} ms, "
        f"ITL p99 {milliseconds('itl_ms', 'p99'):6.2f} ms"
    )


if __name__ == "__main__":
    file, name, streams = sys.argv[1:]
    if Path(file).exists():
        print(line(json.loads(Path(file).read_text())["median"], name, streams), flush=True)
    else:
        print(f"{name:>16} {streams:>4} streams: no figures", flush=True)
