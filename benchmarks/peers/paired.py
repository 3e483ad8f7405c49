"""Two servers of ours that are up at once and take turns, for differences that are smaller than a machine's moods.

A server that is not asked uses no processor. So each round sends few requests to one and then to the other, the next
round the other way round, and what counts is the ratio within a round: what slows the machine for longer than a round
meets both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import measure
from benchmarks.peers.processes import Running, first_answer, reading
from benchmarks.peers.servers import Subject
from benchmarks.peers.workloads import MODEL, Workload

RESAMPLES = 4000
ROUND_S = 9.0
"""About what a workload takes in a round, for both."""


@dataclass(frozen=True)
class Ratio:
    """The median of a workload's ratios, and where nineteen of twenty medians of resampled rounds lie."""

    median: float
    low: float
    high: float


def short(workload: Workload) -> Workload:
    """Return as many requests as there are streams, two for one."""
    return dataclasses.replace(workload, prompts=max(2, workload.concurrency or 8))


def compare(
    plan: measure.Plan, rounds: int, save: Callable[[list[dict[str, Any]]], None]
) -> dict[str, dict[str, Ratio]]:
    """Measure the second subject of `plan`, and each after it, against the first. Return for each workload how many
    times more tokens per second it makes, and per second of its processors. One record per round and workload.
    """
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = [(each, stack.enter_context(measure.started(plan, each, 0))) for each in plan.subjects]
        for subject, server in servers:
            seconds = first_answer(server, MODEL, measure.START_S)
            plan.say(f"{subject.name}: first answer after {seconds:.1f} s")
            if subject.reads:
                stack.enter_context(reading(server, subject.reads))
        for number in range(rounds + 1):
            for place, workload in enumerate(map(short, plan.workloads())):
                order = servers if number % 2 else servers[::-1]
                record = _round(plan, order, workload, seed=1000 * (number + 1) + place)
                if number:  # the first one warms up
                    found.append({"round": number, "workload": workload.name, "subjects": record})
                    save(found)
            plan.say(f"round {number} of {rounds}")
    first, *others = (subject.name for subject in plan.subjects)
    return {other: ratios(found, first, other) for other in others}


def _round(
    plan: measure.Plan, servers: Sequence[tuple[Subject, Running]], workload: Workload, seed: int
) -> dict[str, dict[str, float]]:
    found = {}
    for subject, server in servers:
        server.check()
        record: dict[str, Any] = {}
        median = measure.measured(plan, server, workload, seed=seed, record=record)
        if median is None:
            raise measure.LoadError(record["failures"][0])
        tokens = median["output_tokens"]
        found[subject.name] = {"speed": workload.value(median), "cpu": tokens / median["server_cpu_s"]}
    return found


def ratios(records: Sequence[Mapping[str, Any]], first: str, other: str) -> dict[str, Ratio]:
    """Return the ratios of two subjects, by `WORKLOAD figure`."""
    pairs: dict[str, list[float]] = {}
    for record in records:
        for figure in ("speed", "cpu"):
            before, after = (record["subjects"][name][figure] for name in (first, other))
            pairs.setdefault(f"{record['workload']} {figure}", []).append(after / before)
    return {name: _ratio(values) for name, values in pairs.items()}


def _ratio(values: Sequence[float]) -> Ratio:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return Ratio(statistics.median(values), medians[tail], medians[-tail - 1])


def render(compared: Mapping[str, Mapping[str, Ratio]], first: str) -> str:
    """Return tables of the ratios to the first subject."""
    lines = []
    for other, table in compared.items():
        lines += [f"| {other} / {first} | median of rounds | 95% of resampled medians |", "| --- | ---: | ---: |"]
        lines += [
            f"| {name} | {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} |" for name, ratio in table.items()
        ]
        lines.append("")
    return "\n".join(lines)
