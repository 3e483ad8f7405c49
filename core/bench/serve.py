"""``pegboard bench serve``: a workload against a server, some times over."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pegboard.core.bench.apis import Wanted
from pegboard.core.bench.connection import Address, HttpClient
from pegboard.core.bench.figures import figures
from pegboard.core.bench.load import Load, Outcome, StopWhen, Watcher
from pegboard.core.bench.target import Target, find_target
from pegboard.core.bench.workloads import WORKLOADS, Arrivals, Session, Shape, Workload
from pegboard.core.interfaces.errors import PegboardError

WARM_UP_RUN = 1 << 20
"""The number of the warm-up among the runs, whose prompts are its own."""
LATE_MS = 20.0
"""The load is late where one in a hundred requests is sent so much after its time."""
KNOWN_PROMPTS = 0.5
"""Prompts that share nothing, and are found in the cache: somebody has asked the same before."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What the command line asks for."""

    url: str
    api: str = "auto"
    model: str = ""
    prompt_kind: str = "auto"
    workload: str = "random"
    shape: Shape = field(default_factory=Shape)
    concurrency: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0
    repeat: int = 1
    warmup: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    slo: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 600.0
    wait: float = 0.0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise PegboardError(f"--request-rate must be above 0, got {self.request_rate:g}")
        if not 0 < self.burstiness < math.inf:
            raise PegboardError(f"--burstiness must be above 0, got {self.burstiness:g}")


@dataclass(slots=True)
class Measured:
    """The runs, and the server that they were of."""

    target: Target
    outcomes: list[Outcome] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def run_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """On the quickest event loop there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


class Measurement:
    """Everything between the first look at a server and the figures."""

    def __init__(
        self,
        settings: ServeSettings,
        api_key: str,
        *,
        waiting: Callable[[], AbstractContextManager[Any]],
        watch: Callable[[int], Watcher | None] = lambda run: None,
    ) -> None:
        self._settings = settings
        self._waiting = waiting
        self._watch = watch
        self._client = HttpClient(Address.parse(settings.url), api_key, timeout=settings.timeout)

    async def measure(self) -> Measured:
        """The warm-up and all runs. Raises PegboardError where there is nothing to be measured."""
        settings = self._settings
        try:
            measured = Measured(await self.target())
            measured.notes += measured.target.notes
            await self.warm_up(measured.target)
            for number in range(settings.repeat):
                await self._one(measured, number)
                if measured.stopped:
                    break
        finally:
            self._client.close()
        return measured

    async def target(self) -> Target:
        settings = self._settings
        return await find_target(
            self._client,
            api=settings.api,
            kind=settings.prompt_kind,
            wanted=Wanted(settings.model, settings.temperature, settings.ignore_eos, extra=settings.extra),
            messages=False,
            wait=settings.wait,
            waiting=self._waiting,
        )

    def workload(self, target: Target) -> Workload:
        settings = self._settings
        return WORKLOADS[settings.workload](settings.shape, target.kind, target.token_range, settings.seed)

    async def warm_up(self, target: Target) -> None:
        """Some requests of the workload whose times nobody looks at."""
        sessions = self.workload(target).sessions(WARM_UP_RUN)[: self._settings.warmup]
        if not sessions:
            return
        outcome = await Load(self._client, target.api, target.wanted).closed(sessions, len(sessions))
        if errors := [one.error for one in outcome.records if one.error]:
            raise PegboardError(f"the warm-up failed: {errors[0]}")

    async def run(
        self, target: Target, sessions: list[Session], number: int, rate: float, stop_when: StopWhen | None = None
    ) -> Outcome:
        """One run over these sessions."""
        settings = self._settings
        load = Load(self._client, target.api, target.wanted, watch=self._watch(number), stop_when=stop_when)
        if math.isinf(rate) and settings.concurrency is not None:
            return await load.closed(sessions, settings.concurrency)
        turns = sum(len(one.turns) for one in sessions) / max(1, len(sessions))
        at = Arrivals(rate / turns, settings.burstiness).times(len(sessions), settings.seed, number)
        return await load.open(sessions, at, settings.concurrency)

    async def _one(self, measured: Measured, number: int) -> None:
        settings, target = self._settings, measured.target
        sessions = self.workload(target).sessions(number)
        before = await target.cache_counters()
        outcome = await self.run(target, sessions, number, settings.request_rate)
        found = figures(outcome, settings.slo)
        if found["hit_rate"] is None and before is not None:
            found |= _told(before, await target.cache_counters())
        measured.outcomes.append(outcome)
        measured.runs.append(found)
        measured.stopped = outcome.stopped
        self._judge(measured, found)

    def _judge(self, measured: Measured, found: dict[str, Any]) -> None:
        """What the user should know about a run's figures."""
        late = found["client"]["lag_ms"]
        if late is not None and late["p99"] > LATE_MS and self._settings.concurrency is None:
            measured.note(
                f"requests were sent late (p99 {late['p99']:.0f} ms): this machine has too little left for the load, "
                "and waiting times are shown too short"
            )
        if self._settings.workload == "random" and (found["hit_rate"] or 0) > KNOWN_PROMPTS:
            measured.note(
                f"{found['hit_rate']:.0%} of the prompts' tokens were in the cache, though prompts share nothing: the "
                "same were asked before; take another --seed"
            )
        if found["completed"] and found["itl_ms"] and "usage" in found["counted"]:
            pieces = sum(len(one.times) for one in measured.outcomes[-1].records if one.ok)
            if measured.outcomes[-1].records[0].counts is None and pieces < 0.9 * found["output_tokens"]:
                measured.note(
                    f"{found['output_tokens']} tokens came in {pieces} pieces: ITL is the time between pieces, TPOT "
                    "that between tokens"
                )


def _told(before: tuple[float, float], after: tuple[float, float] | None) -> dict[str, Any]:
    """The hit rate between two looks at the server's counters."""
    if after is None or after[1] <= before[1]:
        return {}
    hits = after[0] - before[0]
    return {"cached_tokens": int(hits), "hit_rate": hits / (after[1] - before[1])}
