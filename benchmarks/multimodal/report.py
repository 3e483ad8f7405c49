"""The tables of `python -m benchmarks.multimodal`, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = list[tuple[str, str, str]]


def table(part: str, found: dict[str, Any]) -> str:
    """Return one part's table, with what each figure aims at."""
    rows = {"text": _text, "streams": _streams, "transport": _transport, "again": _again}[part](found)
    lines = [f"| {part} | measured | aim |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _spread(found: dict[str, float], digits: int = 3) -> str:
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f} to {found['max']:.{digits}f})"


def _text(found: dict[str, Any]) -> Rows:
    rows = [(f"output tok/s, {name}", f"{value:.0f}", "") for name, value in found["tokens_per_s"].items()]
    cpu = found["cpu_ms_per_token"]
    rows += [(f"CPU time of a token, {name}", f"{value:.2f} ms", "") for name, value in cpu.items()]
    for key, title in (("to_tower", "takes pictures, to text tower"), ("to_before", "text tower, to before")):
        if key in found:
            rows.append((f"output tok/s, {title}", _spread(found[key]), "0.98"))
            rows.append((f"CPU time, {title}", _spread(found[f"{key}_cpu"]), ""))
    rows.append(("all give the same answers", "yes" if found["same_answers"] else "NO", "yes"))
    return rows


def _streams(found: dict[str, Any]) -> Rows:
    both = found["pictures"], found["texts"]

    def row(title: str, key: str, aim: str = "") -> tuple[str, str, str]:
        one, other = (f"{those[key]:.1f}" for those in both)
        return title, f"{one} ms; with texts {other} ms", aim

    return [
        ("median time between tokens, to that with texts", _spread(found["itl_ratio"]), "at most 1.15"),
        row("time between tokens, median", "itl_ms"),
        row("time between tokens, p99", "itl_p99_ms"),
        row("longest gap", "gap_ms"),
        ("steps in a row without decodes, most", f"{both[0]['in_a_row']}; with texts {both[1]['in_a_row']}", "1"),
        row("longest gap between steps that decode, in the scheduler", "scheduler_gap_ms"),
        row("longest chunk", "chunk_ms"),
        row("longest piece", "piece_ms"),
        row("longest gap, beyond the longest chunk or piece", "beyond_ms", "at most 20 ms"),
        row("event loop of the API process, latest beat", "late_ms", "at most 20 ms"),
        row("most that it computed in one go, where it was late", "late_computing_ms"),
        row("time to first token of what arrives, median", "ttft_ms"),
    ]


def _transport(found: dict[str, Any]) -> Rows:
    rows: Rows = []
    for size, one in found.items():
        cpu, sizes = one["cpu_ms"], one["bytes"]
        rows += [
            (f"{size}: CPU time, file to message", _spread(one["cpu_ratio"]), "0.25"),
            (f"{size}: CPU time", f"{cpu['file']:.1f} ms; message {cpu['message']:.1f} ms", ""),
            (f"{size}: bytes, file to message", f"{one['bytes_ratio']:.3f}", "0.125"),
            (f"{size}: bytes", f"{sizes['file']:,}; message {sizes['message']:,}", ""),
        ]
    return rows


def _again(found: dict[str, Any]) -> Rows:
    cases: Sequence[str] = ("new", "prefix cached", "encoding cached")
    rows = []
    for case in cases:
        one = found[case]
        parts = f"encoding {one['encoding_ms']:.0f}, prefill {one['computing_ms']:.0f}"
        spread = f"{one['min_ms']:.0f} to {one['max_ms']:.0f}"
        rows.append((f"time to first token, {case}", f"{one['ttft_ms']:.0f} ms ({spread}; {parts})", ""))
    layers = f"{found['vision_layers']} layers of the vision tower"
    return [
        *rows,
        (f"share of encoding in the prefill of a new one, with {layers}", f"{found['encoding_share']:.2f}", "0.5"),
        ("times lower with the prefix cached", _spread(found["prefix cached, times lower"], 1), "5"),
        ("times lower with the encoding cached", _spread(found["encoding cached, times lower"], 2), "2"),
    ]
