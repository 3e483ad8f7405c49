"""``pegboard bench serve``: a workload against a server, some times over, or at rising rates."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import Wanted
from pegboard.tools.bench.connection import Address, HttpClient
from pegboard.tools.bench.figures import figures
from pegboard.tools.bench.files import FROM_FILE, has_messages, make_workload, read_lines
from pegboard.tools.bench.find_rate import IDLE, Bound, Trial, search, stop_early, verdict
from pegboard.tools.bench.load import INTERRUPTED, TICK, Load, Outcome, StopWhen, Watcher
from pegboard.tools.bench.target import Target, find_target
from pegboard.tools.bench.workloads import IMAGES, WARM_UP_RUN, Arrivals, Session, Shape, Workload

DEFAULT_REQUESTS = 100
BURST_RUN = 1 << 21
BURST = 64
"""Requests at once, which tell about how many per second a server is good for."""
BURST_SHARE = 0.75
"""At this share of that rate the search for the highest one begins."""
LATE_MS = 20.0
"""The load is late where one in a hundred requests is sent so much after its time."""
MISCOUNT = 0.1
"""Prompts whose tokens differ by more than this share from what they should have."""
KNOWN_PROMPTS = 0.5
"""Prompts that share nothing, and are found in the cache: the same was asked before."""
MANY_PIECES = 0.9

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
    file: Path | None = None
    concurrency: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    replay: float | None = None
    """Arrivals are those that the file has, so many times as fast."""
    find_rate: tuple[Bound, ...] = ()
    trial_seconds: float = 30.0
    precision: float = 0.05
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
        for name, value in (
            ("request-rate", self.request_rate),
            ("burstiness", self.burstiness),
            ("trial-seconds", self.trial_seconds),
            ("precision", self.precision),
            ("timeout", self.timeout),
            ("replay", 1.0 if self.replay is None else self.replay),
        ):
            if not value > 0:
                raise PegboardError(f"--{name} must be above 0, got {value:g}")
        if (self.file is None) == (self.workload == FROM_FILE):
            raise PegboardError(f"--workload {FROM_FILE} and --file go together")
        if self.replay is not None and self.file is None:
            raise PegboardError("--replay is for a --file that says when its requests came")
        if self.replay is not None and (self.find_rate or math.isfinite(self.request_rate)):
            raise PegboardError("--replay takes the times from the file; leave out --request-rate and --find-rate")
        if self.find_rate and self.concurrency is not None:
            raise PegboardError(
                "--find-rate sends every request at its time, however many are under way; leave out --concurrency"
            )


@dataclass(slots=True)
class Measured:
    """The runs, and the server that they were of. In a search for a rate, runs are the best trials."""

    target: Target
    outcomes: list[Outcome] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""
    searches: list[list[Trial]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """The highest rates that were kept."""

    @property
    def rate(self) -> float | None:
        """Their median."""
        return statistics.median(self.rates) if self.rates else None

    def note(self, text: str) -> None:
        """Once."""
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
    """Everything between the first look at a server and the figures. `watch` makes, of a title and a number of
    requests, what is told how far a run is.
    """

    def __init__(
        self,
        settings: ServeSettings,
        api_key: str,
        *,
        waiting: Callable[[], AbstractContextManager[Any]],
        watch: Callable[[str, int], Watcher | None] = lambda title, total: None,
    ) -> None:
        self._settings = settings
        self._waiting = waiting
        self._watch = watch
        self._lines = None if settings.file is None else read_lines(settings.file)
        self._client = HttpClient(Address.parse(settings.url), api_key, timeout=settings.timeout)
        self._number = 0
        """Of the last run or trial: prompts are drawn anew for each."""
        self._arrivals = 0
        """Of the run or search: all trials of one have the same gaps, but for the rate, which makes them comparable."""
        self.measured: Measured | None = None
        """As far as it has come."""

    async def measure(self) -> Measured:
        """Return the warm-up and all runs. Raises PegboardError where there is nothing to be measured; cancelled it
        leaves what there is in `measured`.
        """
        settings = self._settings
        watcher = asyncio.ensure_future(self._watch_silence())
        try:
            target = await self._target()
            self.measured = measured = Measured(target, notes=list(target.notes))
            await self._warm_up(target)
            for number in range(settings.repeat):
                if settings.find_rate:
                    await self._search(measured, number)
                else:
                    await self._one(measured, number)
                if measured.stopped:
                    break
        finally:
            watcher.cancel()
            self._client.close()
        return measured

    async def _watch_silence(self) -> None:
        """End what waits for a silent server for longer than was said."""
        while True:
            await asyncio.sleep(TICK)
            self._client.expire()

    async def _target(self) -> Target:
        settings = self._settings
        return await find_target(
            self._client,
            api=settings.api,
            kind=settings.prompt_kind,
            wanted=Wanted(settings.model, settings.temperature, settings.ignore_eos, extra=settings.extra),
            messages=settings.workload == IMAGES or (self._lines is not None and has_messages(self._lines)),
            answers=settings.workload == "multi-turn",
            wait=settings.wait,
            waiting=self._waiting,
        )

    def _workload(self, target: Target, requests: int | None = None) -> Workload:
        settings = self._settings
        shape = settings.shape
        if requests is None:
            requests = shape.requests or len(self._lines or ()) or DEFAULT_REQUESTS
        shape = replace(shape, requests=requests)
        return make_workload(settings.workload, shape, target.kind, target.token_range, settings.seed, self._lines)

    async def _warm_up(self, target: Target) -> None:
        """Send some requests of the workload whose times do not count."""
        count = self._settings.warmup
        if not count:
            return
        shape = replace(self._settings.shape, requests=count)
        # A file's own prompts would be in the cache afterwards.
        name = "random" if self._lines else self._settings.workload
        workload = make_workload(name, shape, target.kind, target.token_range, self._settings.seed)
        sessions = workload.sessions(WARM_UP_RUN)
        outcome = await Load(self._client, target.api, target.wanted).closed(sessions, len(sessions))
        if errors := [one.error for one in outcome.records if one.error]:
            raise PegboardError(f"the warm-up failed: {errors[0]}")

    async def _run(
        self,
        target: Target,
        sessions: list[Session],
        rate: float,
        title: str,
        stop_when: StopWhen | None = None,
    ) -> Outcome:
        settings = self._settings
        total = sum(len(one.turns) for one in sessions)
        load = Load(self._client, target.api, target.wanted, watch=self._watch(title, total), stop_when=stop_when)
        if settings.replay is not None:
            at = [0.0 if one.at is None else one.at / settings.replay for one in sessions]
            order = sorted(range(len(at)), key=at.__getitem__)
            first = at[order[0]]
            return await load.open([sessions[i] for i in order], [at[i] - first for i in order], settings.concurrency)
        if math.isinf(rate) and settings.concurrency is not None:
            return await load.closed(sessions, settings.concurrency)
        arrivals = Arrivals(rate * len(sessions) / total, settings.burstiness)
        at = arrivals.times(len(sessions), settings.seed, self._arrivals)
        return await load.open(sessions, at, settings.concurrency)

    async def _one(self, measured: Measured, number: int) -> None:
        """One run of the workload."""
        settings, target = self._settings, measured.target
        sessions = self._workload(target).sessions(number)
        self._arrivals = number
        before = await target.cache_counters()
        title = f"run {number + 1} of {settings.repeat}" if settings.repeat > 1 else ""
        outcome = await self._run(target, sessions, settings.request_rate, title)
        found = figures(outcome, settings.slo)
        if found["hit_rate"] is None and before is not None:
            found |= _told(before, await target.cache_counters())
        measured.outcomes.append(outcome)
        measured.runs.append(found)
        measured.stopped = outcome.stopped
        self._judge(measured, outcome, found)

    async def _search(self, measured: Measured, number: int) -> None:
        """One search for the highest rate."""
        self._arrivals = number
        best: dict[float, tuple[Outcome, dict[str, Any]]] = {}

        async def attempt(rate: float) -> Trial:
            outcome, trial = await self._trial(measured, rate)
            if trial.kept:
                best[rate] = outcome, trial.figures
            return trial

        trials, rate = await search(attempt, await self._guess(measured, number), self._settings.precision)
        measured.searches.append(trials)
        if rate is not None:
            measured.rates.append(rate)
            measured.outcomes.append(best[rate][0])
            measured.runs.append(best[rate][1])
            self._judge(measured, *best[rate])

    async def _guess(self, measured: Measured, number: int) -> float:
        """Return where to begin: with the rate that was given or found before, or a share of what a burst gets done."""
        if measured.rates:
            return measured.rates[-1]
        if math.isfinite(self._settings.request_rate):
            return self._settings.request_rate
        # Far from the numbers of all trials, so that its prompts are new ones.
        self._number = BURST_RUN * (number + 1)
        sessions = self._workload(measured.target, BURST).sessions(self._number)
        outcome = await self._run(measured.target, sessions, math.inf, "burst")
        found = figures(outcome)
        if not found["completed"]:
            said = found["errors"][0]["message"] if found["errors"] else outcome.stopped
            raise PegboardError(f"none of {found['requests']} requests at once got an answer: {said}")
        return float(found["request_throughput"]) * BURST_SHARE

    async def _trial(self, measured: Measured, rate: float) -> tuple[Outcome, Trial]:
        settings, target = self._settings, measured.target
        self._number += 1
        requests = max(settings.shape.requests or DEFAULT_REQUESTS, math.ceil(rate * settings.trial_seconds))
        sessions = self._workload(target, requests).sessions(self._number)
        bounds = settings.find_rate
        outcome = await self._run(target, sessions, rate, f"{rate:.2f}/s", stop_early(bounds, requests))
        found = figures(outcome, settings.slo)
        trial = Trial(rate, verdict(outcome, found, bounds), found, last=outcome.stopped == INTERRUPTED)
        trial.idle = found["mean_concurrency"] < IDLE
        if trial.last:
            measured.stopped = INTERRUPTED
        elif not trial.kept:
            await self._settle(target)
        return outcome, trial

    async def _settle(self, target: Target) -> None:
        """Wait until the server has got over a trial that was too much: after all that waits there."""
        self._number += 1
        session = self._workload(target, 1).sessions(self._number)
        outcome = await Load(self._client, target.api, target.wanted).closed(session, 1)
        if error := outcome.records[0].error:
            raise PegboardError(f"after a trial the server did not recover: {error}")

    def _judge(self, measured: Measured, outcome: Outcome, found: dict[str, Any]) -> None:
        """Tell the user what to know about a run's figures."""
        late = found["client"]["lag_ms"]
        if late is not None and late["p99"] > LATE_MS and self._settings.concurrency is None:
            measured.note(
                f"requests were sent late (p99 {late['p99']:.0f} ms): this machine has too little left for the load, "
                "and waiting times are shown too short"
            )
        elif late is not None and late["p99"] > LATE_MS and math.isfinite(self._settings.request_rate):
            measured.note(
                f"requests waited for one of {self._settings.concurrency} slots (p99 {late['p99']:.0f} ms), which "
                "TTFT and E2E do not show: they begin with the sending"
            )
        if self._settings.workload == "random" and (found["hit_rate"] or 0) > KNOWN_PROMPTS:
            measured.note(
                f"{found['hit_rate']:.0%} of the prompts' tokens were in the cache, though prompts share nothing: the "
                "same were asked before; take another --seed"
            )
        good = [one for one in outcome.records if one.ok]
        short = sum(one.finish_reason == "stop" for one in good)
        if short and measured.target.wanted.ignore_eos:
            measured.note(f"{short} answers ended before their length: the server does not heed ignore_eos")
        both = [one for one in good if one.prompt_tokens and one.input_len]
        told, meant = sum(one.prompt_tokens or 0 for one in both), sum(one.input_len or 0 for one in both)
        if abs(told - meant) > MISCOUNT * meant:
            measured.note(f"prompts have {told} tokens by the server's count, and were to have {meant}")
        if good and good[0].counts is None and "usage" in found["counted"]:
            pieces = sum(len(one.times) for one in good)
            if pieces < MANY_PIECES * found["output_tokens"]:
                measured.note(
                    f"{found['output_tokens']} tokens came in {pieces} pieces: ITL is the time between pieces, TPOT "
                    "that between tokens"
                )


def _told(before: tuple[float, float], after: tuple[float, float] | None) -> dict[str, Any]:
    """Return the hit rate between two looks at the server's counters."""
    if after is None or after[1] <= before[1]:
        return {}
    hits = after[0] - before[0]
    return {"cached_tokens": int(hits), "hit_rate": hits / (after[1] - before[1])}
