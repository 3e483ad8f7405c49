"""Medians, ratios, and the tables of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers import one_stream
from benchmarks.peers.servers import BEFORE
from benchmarks.peers.workloads import RATE_SEARCH, WORKLOADS

VLLM, OURS = "vllm", "pegboard"
START_LIMIT_S = 10.0
RATE_TARGET = 2.5
SAME = 0.98
"""What a change may cost: the target of all figures against another checkout."""
LLAMA_TARGETS = (("decode", "decode, 1 stream", 2.0), ("prefill", "prefill, 1 stream", 5.0))
MISSING = "–"  # noqa: RUF001 - what a cell without a figure shows


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` says how many times better ours is, whether more or less is better; `lowest` and
    `highest` are the ratios of single repetitions.
    """

    title: str
    theirs: float | None
    ours: float | None
    ratio: float | None
    lowest: float | None
    highest: float | None
    target: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        spread = ""
        if self.lowest is not None and self.highest is not None:
            spread = f" ({self.lowest:.2f} to {self.highest:.2f})"
        ratio = MISSING if self.ratio is None else f"{self.ratio:.2f}×{spread}"  # noqa: RUF001
        met = MISSING if self.met is None else "yes" if self.met else "no"
        return self.title, number(self.theirs), number(self.ours), ratio, self.target, met


def number(value: float | None) -> str:
    """As many digits as mean something."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def ratio(theirs: float | None, ours: float | None, *, lower_is_better: bool) -> float | None:
    """Return how many times better `ours` is; None where it cannot be said."""
    if not theirs or not ours:
        return None
    return theirs / ours if lower_is_better else ours / theirs


def _row(
    title: str, theirs: Mapping[int, float | None], ours: Mapping[int, float | None], target: float, *, lower: bool
) -> Row:
    """`theirs` and `ours` by the number of the repetition."""
    a, b = median(list(theirs.values())), median(list(ours.values()))
    found = ratio(a, b, lower_is_better=lower)
    single = [
        one
        for run in sorted(set(theirs) & set(ours))
        if (one := ratio(theirs[run], ours[run], lower_is_better=lower)) is not None
    ]
    low, high = (min(single), max(single)) if len(single) > 1 else (None, None)
    met = None if found is None else found >= target
    return Row(title, a, b, found, low, high, f"{target:g}×", met)  # noqa: RUF001


def server_rows(records: Sequence[Mapping[str, Any]], ours: str = OURS, theirs: str = VLLM) -> Iterator[Row]:
    """Yield the table of servers. Against another checkout, which has its target for all."""
    same = theirs == BEFORE

    def by_run(subject: str, name: str, figure: str) -> dict[int, float | None]:
        found: dict[int, float | None] = {}
        for one in records:
            if one["subject"] == subject:
                value: Any = one["workloads"].get(name)
                for part in figure.split("."):
                    value = None if value is None else value.get(part)
                found[one["run"]] = value
        return found

    def plain(subject: str, key: str) -> dict[int, float | None]:
        return {one["run"]: one.get(key) for one in records if one["subject"] == subject}

    for workload in WORKLOADS:
        a, b = (by_run(subject, workload.name, workload.figure) for subject in (theirs, ours))
        row = _row(
            f"{workload.title}, {workload.unit}",
            a,
            b,
            SAME if same else workload.target,
            lower=workload.lower_is_better,
        )
        if row.theirs is not None or row.ours is not None:
            yield row
    if any(RATE_SEARCH in one for one in records):
        title = "highest rate of 256 in / 64 out with p99 TTFT under 1 s, requests/s"
        yield _row(
            title, plain(theirs, RATE_SEARCH), plain(ours, RATE_SEARCH), SAME if same else RATE_TARGET, lower=False
        )
    start = _row("start to first answer, s", plain(theirs, "start_s"), plain(ours, "start_s"), 0.0, lower=True)
    met = None if start.ours is None else start.ours < START_LIMIT_S
    yield replace(start, target=f"under {START_LIMIT_S:g} s", met=met)
    memory = [
        {run: None if value is None else value / 2**20 for run, value in plain(subject, "resident_bytes").items()}
        for subject in (theirs, ours)
    ]
    row = _row("resident memory after the workloads, MB", memory[0], memory[1], 0.0, lower=True)
    yield replace(row, target=MISSING, met=None)


def llama_rows(records: Sequence[Mapping[str, Any]], theirs: str, ours: str, *, targets: bool) -> Iterator[Row]:
    """Yield the table of one stream in a process, against one of llama.cpp's files."""
    for key, title, target in LLAMA_TARGETS:
        values = [{one["run"]: one.get(key) for one in records if one["lane"] == lane} for lane in (theirs, ours)]
        row = _row(f"{title}, tok/s", values[0], values[1], target if targets else 1.0, lower=False)
        yield row if targets or key == "decode" else replace(row, target=MISSING, met=None)


def _is_vllm(subject: str) -> bool:
    """Return whether it is vLLM, or a variant of it."""
    return subject == VLLM or subject.startswith(f"{VLLM}-")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(one) + " |" for one in lines)


def render(data: Mapping[str, Any]) -> str:
    """Return all tables of a comparison, from its JSON."""
    machine, parts = data["machine"], []
    of = f"medians of {data['runs']}" if data["runs"] > 1 else "one run"
    memory = machine["memory_bytes"] / 2**30
    parts.append(
        f"{data['date']}, {machine['cpu']}, {machine['cores']} cores, {memory:.0f} GB; {of}; `{data['command']}`"
    )
    head = ("ratio", "at least", "met")
    servers = data.get("servers", [])
    subjects = sorted({one["subject"] for one in servers})
    peers = [one for one in subjects if _is_vllm(one) or one == BEFORE]
    for ours in (one for one in subjects if one not in peers):
        # Alone it has a table, too.
        for theirs in peers or [VLLM]:
            rows = [row.cells() for row in server_rows(servers, ours, theirs)]
            variant = theirs.removeprefix(VLLM).removeprefix("-")
            peer = theirs if theirs == BEFORE else f"{data['versions']['vllm']} {variant}".strip()
            parts.append(markdown(("", peer, ours, *head), rows))
    records = data.get("one_stream", [])
    lanes = [one for one in dict.fromkeys(r["lane"] for r in records) if not one.startswith("llama.cpp")]
    for ours in lanes:
        for theirs in (one_stream.BF16, one_stream.Q4):
            # The targets are those of bf16 against bf16; against four bits, to be faster at all.
            rows = [row.cells() for row in llama_rows(records, theirs, ours, targets=theirs == one_stream.BF16)]
            parts.append(markdown(("", theirs, ours, *head), rows))
    problems = [
        f"- {one['subject']}, run {one['run'] + 1}: {one['error'].splitlines()[0]}" for one in servers if "error" in one
    ]
    problems += [
        f"- {one['subject']}, run {one['run'] + 1}: {text.splitlines()[0]}"
        for one in servers
        for text in one.get("failures", [])
    ]
    problems += [f"- {one['lane']}, run {one['run'] + 1}: {one['error']}" for one in records if "error" in one]
    busy = [one["busy_percent"] for one in servers if one.get("busy_percent") is not None]
    if busy and max(busy) > 15:
        problems.append(f"- others used up to {max(busy):.0f}% of the machine: absolute figures are in doubt")
    if problems:
        parts.append("\n".join(problems))
    return "\n\n".join(parts) + "\n"
