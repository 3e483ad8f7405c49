"""Streams that decode while pictures arrive, and while texts of as many tokens do."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.multimodal.load import (
    CHAT,
    NATIVE,
    about,
    checked,
    client_of,
    in_turn,
    load,
    once,
    pictures,
    ratio,
    rest,
    run,
    tokens,
)
from benchmarks.multimodal.models import seeing_model
from benchmarks.multimodal.served import Late, Server, Step, serving
from pegboard.tools.bench.apis import Api
from pegboard.tools.bench.images import ImageSize
from pegboard.tools.bench.load import Outcome
from pegboard.tools.bench.records import STOPPED, Record
from pegboard.tools.bench.workloads import Session

PICTURES, TEXTS = "pictures", "texts"
PROMPT = 64
"""Tokens of a stream's prompt."""
SETTLE_S = 0.5
MOST_TURNS = 32
"""Streams follow each other so many times, should their answers be too short for a round."""


@dataclass(frozen=True)
class Plan:
    """So many `streams`, and prompts that arrive `rate` times a second for `seconds`, in so many `rounds` of each
    kind.
    """

    size: str = "small"
    rounds: int = 3
    streams: int = 8
    rate: float = 2.0
    seconds: float = 10.0
    image: ImageSize = field(default_factory=lambda: ImageSize(1024, 1024))
    kv_tokens: int = 131_072


@dataclass
class Round:
    """What one round saw. `gaps` between two arrivals of tokens, in seconds, with how many tokens came then."""

    kind: str
    gaps: list[tuple[float, int]]
    ttft: list[float]
    late: list[Late]
    steps: list[Step]
    streams: int

    def figures(self) -> dict[str, Any]:
        """In milliseconds. `beyond_ms` is what the longest gap has beyond the longest step."""
        gaps = np.array([seconds for seconds, _ in self.gaps]) * 1000
        counts = np.array([count for _, count in self.gaps])
        # Tokens that came together share the time before them.
        each = np.repeat(gaps / counts, counts)
        longest = {kind: max((one.seconds for one in self.steps if one.kind == kind), default=0.0) for kind in _KINDS}
        step = max(longest.values()) * 1000
        # Apart from what the API process and the network add.
        ends = [one.at for one in self.steps if one.tokens >= self.streams]
        return {
            "kind": self.kind,
            "itl_ms": float(np.median(each)),
            "itl_p99_ms": float(np.percentile(each, 99)),
            "gap_ms": float(gaps.max()),
            "beyond_ms": float(gaps.max()) - step,
            "in_a_row": without_decodes(self.steps, self.streams),
            "scheduler_gap_ms": max((b - a for a, b in itertools.pairwise(ends)), default=0.0) * 1000,
            "chunk_ms": longest["chunk"] * 1000,
            "piece_ms": longest["piece"] * 1000,
            "steps": {kind: sum(one.kind == kind for one in self.steps) for kind in _KINDS},
            "ttft_ms": statistics.median(self.ttft) * 1000,
            "late_ms": max((one.late for one in self.late), default=0.0) * 1000,
            "late_computing_ms": max((one.computing for one in self.late), default=0.0) * 1000,
            "late_beats": len(self.late),
        }


def without_decodes(steps: Sequence[Step], streams: int) -> int:
    """Return the most steps in a row none of which brought each stream a token."""
    runs = (len(list(those)) for held, those in itertools.groupby(steps, lambda one: one.tokens < streams) if held)
    return max(runs, default=0)


_KINDS = ("chunk", "piece")
_WORST = ("gap_ms", "beyond_ms", "scheduler_gap_ms", "in_a_row", "late_ms", "late_computing_ms")


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the figures of all rounds, and what they come to."""
    model = seeing_model(folder, plan.size)
    config = {"memory": {"max_total_tokens": plan.kv_tokens}}
    with serving("streams", model, config=config, watched=True) as server:
        return report([one.figures() for one in run(_rounds(server, plan))])


def report(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratio of the median time between tokens, and the worst of everything else."""
    by_kind = {kind: [one for one in rounds if one["kind"] == kind] for kind in (PICTURES, TEXTS)}
    pairs = zip(by_kind[PICTURES], by_kind[TEXTS], strict=True)
    found: dict[str, Any] = {
        "itl_ratio": ratio([(one["itl_ms"], other["itl_ms"]) for one, other in pairs]),
        "rounds": list(rounds),
    }
    for kind, those in by_kind.items():
        medians = {key: statistics.median(one[key] for one in those) for key in ("itl_ms", "itl_p99_ms", "ttft_ms")}
        worst = {key: max(one[key] for one in those) for key in _WORST}
        longest = {key: max(one[key] for one in those) for key in ("chunk_ms", "piece_ms")}
        found[kind] = {**medians, **worst, **longest}
    return found


async def _rounds(server: Server, plan: Plan) -> list[Round]:
    random = np.random.default_rng(0)
    length, pace = await _warm_up(server, plan, random)
    count = max(1, round(plan.rate * plan.seconds))
    found = []
    for number in range(2 * plan.rounds):
        # Pictures first in one pair, texts first in the next.
        kind = (PICTURES, TEXTS)[(number + number // 2) % 2]
        if kind == PICTURES:
            made = [about(one, f"What is this, number {number}?") for one in pictures(random, count, plan.image)]
            arriving, api = [once(one, 4) for one in made], CHAT
        else:
            arriving, api = [once(tokens(random, length), 4, length) for _ in range(count)], NATIVE
        found.append(await _round(server, plan, kind, api, arriving, round(1.5 * plan.seconds / pace)))
        await rest(SETTLE_S)
    return found


async def _warm_up(server: Server, plan: Plan, random: np.random.Generator) -> tuple[int, float]:
    """Return the tokens of a prompt with a picture, and the seconds for each token of streams that are alone."""
    async with client_of(server.url) as client:
        shown = await in_turn(client, CHAT, [once(about(one, "What?"), 4) for one in pictures(random, 2, plan.image)])
        alone = await load(client, NATIVE).closed(_streams(plan, random, 64), plan.streams)
    length = checked(shown).records[-1].prompt_tokens
    assert length is not None
    return length, pace_of(checked(alone).records)


def pace_of(records: Sequence[Record]) -> float:
    """Return the seconds for each token, the first included: most tokens of a tiny model are read together, so that
    there is no time between them.
    """
    return statistics.median((one.end - one.sent) / one.output_tokens for one in records)


def _streams(plan: Plan, random: np.random.Generator, output: int, times: int = 1) -> list[Session]:
    return [once(tokens(random, PROMPT), output, PROMPT) for _ in range(plan.streams * times)]


async def _round(server: Server, plan: Plan, kind: str, api: Api, arriving: Sequence[Session], output: int) -> Round:
    """Send what arrives while streams decode, which are stopped when the last of it is answered."""
    over = False
    random = np.random.default_rng(time.monotonic_ns())
    async with client_of(server.url) as client, client_of(server.url) as other:
        streams = asyncio.create_task(
            load(client, NATIVE, lambda records, now: "over" if over else "").closed(
                _streams(plan, random, output, MOST_TURNS), plan.streams
            )
        )
        await asyncio.sleep(SETTLE_S)
        start = time.perf_counter()
        at = [number / plan.rate for number in range(len(arriving))]
        arrived = checked(await load(other, api).open(arriving, at))
        stop = time.perf_counter()
        over = True
        decoded = await streams
    return Round(
        kind,
        gaps_of(_running(decoded), start, stop),
        [one.ttft for one in arrived.records],
        server.watched.late(start, stop),
        server.watched.in_order(start, stop),
        plan.streams,
    )


def _running(outcome: Outcome) -> list[Record]:
    """Return the streams. Raises RuntimeError where one failed, and where all had ended before the round did."""
    if errors := [one.error for one in outcome.records if one.error not in ("", STOPPED)]:
        raise RuntimeError(f"{len(errors)} streams failed: {errors[0]}")
    if not outcome.stopped:
        raise RuntimeError("the streams ended before the round did")
    return outcome.records


def gaps_of(records: Sequence[Record], start: float, stop: float) -> list[tuple[float, int]]:
    """Return the gaps that end in [start, stop), and how many tokens each ended with. What was read at once came at
    once.
    """
    found = []
    for one in records:
        tokens_at: Counter[float] = Counter()
        for at, count in zip(one.times, one.counts or [1] * len(one.times), strict=True):
            tokens_at[at] += count
        found += [
            (after - before, tokens_at[after])
            for before, after in itertools.pairwise(tokens_at)
            if start <= after < stop
        ]
    return found
