"""Running a workload: arrivals into the scheduler, batches to the modelled device, and a record of every request."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import Rejected, TokenizedBatch, TokenizedRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.points import encoded
from pegboard.plugins.media.work import NAME
from pegboard.toolkit.cache.radix_tree import RadixTree
from pegboard.toolkit.sampling.tree import walk
from pegboard.tools.lab.assemble import EOS, assemble, chunk_of
from pegboard.tools.lab.clock import VirtualClock
from pegboard.tools.lab.drafts import accept, speculation_of
from pegboard.tools.lab.media import LabMedia, media_section
from pegboard.tools.lab.tiers import LabTiers
from pegboard.tools.lab.workloads import FIRST_TOKEN, VOCAB, Ask, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.batch import ModelWorkerBatch, ScheduleBatch
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import Stage
    from pegboard.plugins.media.api import PieceKey
    from pegboard.plugins.media.work import EncodeWork
    from pegboard.tools.lab.cost import CostModel

Progress = Callable[[int], None]

BUCKETS = np.geomspace(1e-5, 1e3, 400)
"""Edges of the histogram that inter-token times are kept in, in seconds: 2% wide."""
TIMELINE_EVERY = 25
REST = 0.002
"""Virtual seconds that pass while all requests are held back by gates."""


@dataclass(slots=True)
class Record:
    """What became of one request. Times in virtual seconds; a rejected or failed one has `finished` 0."""

    group: str
    priority: int
    arrived: float
    prompt_len: int
    output_len: int = 0
    cached: int = 0
    cached_host: int = 0
    cached_storage: int = 0
    retractions: int = 0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True)
class Outcome:
    """One run. `timeline` has rows (time, running, waiting, used tokens, cached tokens)."""

    label: str
    records: list[Record]
    duration: float
    wall: float
    prefill_steps: int
    decode_steps: int
    retractions: int
    preemptions: int
    computed_tokens: int
    cached_tokens: int
    optimal_cached: int | None
    policy: dict[str, float]
    intervals: NDArray[np.int64]
    timeline: NDArray[np.float64]
    total_tokens: int
    rejected: int = 0
    encoding: dict[str, float] | None = None
    """See `LabMedia.figures`; None for a workload without media."""
    accept_length: float | None = None
    """Tokens that a request gained per step in which it had drafts; None where there are none."""
    tiers: dict[str, float] | None = None
    """See `LabTiers.figures`; None for a prefix cache without tiers."""
    info: dict[str, float] = field(default_factory=dict)


class ModelledDevice:
    """Takes the time that the cost model says, and answers with tokens; an output ends where the workload has it end.

    A request's number travels as its seed, the one thing of a request that reaches a device untouched.
    """

    def __init__(
        self, cost: CostModel, clock: VirtualClock, tiers: LabTiers, seed: int, rates: Sequence[float] = ()
    ) -> None:
        self._cost = cost
        self._tiers = tiers
        self._rates = rates
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self.ends: list[int] = []
        """The length of each request's output, by its number."""
        self._encoded: set[PieceKey] = set()

    def encode(self, work: EncodeWork) -> Done[float]:
        """Encode media; the virtual seconds that it took."""
        seconds = self._cost.encode_seconds(work)
        self._clock.now += seconds
        self._encoded.difference_update(work.drop)
        self._encoded.update(piece.key for piece in work.pieces)
        return Done(seconds)

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        parts: Any = work.payloads.get(NAME, ())
        if not all(part.key in self._encoded for part in parts):
            raise RuntimeError("a prefill reads media that are not encoded")
        self._clock.now += self._cost.seconds(work) + self._tiers.load(work)
        sampling = work.sampling
        if sampling is None:
            return BatchResult(np.empty(0, np.int64))
        numbers = sampling.numbers["seed"].tolist()
        tokens: NDArray[np.int64] = self._random.integers(FIRST_TOKEN, VOCAB, len(numbers))
        if work.trees is not None:
            tokens = accept(work.trees, tokens, self._rates, self._random)
        ends = np.fromiter((self.ends[number] for number in numbers), np.int64, len(tokens))
        tokens[sampling.steps + 1 >= ends] = EOS
        if work.trees is None:
            return BatchResult(tokens)
        accepted = walk(work.trees, tokens)
        return BatchResult(accepted.tokens, accepted=accepted)


class Simulation:
    """One workload under one config."""

    def __init__(
        self,
        label: str,
        resolved: ResolvedConfig,
        workload: Workload,
        cost: CostModel,
        *,
        optimal: bool = True,
        rates: Sequence[float] = (),
    ) -> None:
        self.label = label
        self._rates = rates
        self.clock = VirtualClock()
        self._tiers = LabTiers(cost, self.clock)
        self.device = ModelledDevice(cost, self.clock, self._tiers, resolved.engine.scheduler.seed, rates)
        hooks = StepHooks(batch_committed=(self._committed,), requests_finished=(self._finished,))
        wants_media = workload.has_media and media_section(resolved.engine).enabled
        self._media = LabMedia(resolved.engine, cost, chunk_of(resolved.engine)) if wants_media else None
        joining: list[Stage] = [] if self._media is None else [self._media.stage]
        joining += [speculation_of(resolved, rates, VOCAB, self.clock)] if rates else []
        self.scheduler = assemble(
            resolved, lambda work: Done(self.device(work)), self.clock, hooks, VOCAB,
            joining=joining, runs={NAME: self.device.encode}, tiers=self._tiers,
        )  # fmt: skip
        self._asks = workload.arrivals()
        self._next = next(self._asks, None)
        self._later: list[tuple[float, int, Ask]] = []
        self._order = itertools.count()
        self._open: dict[str, tuple[Ask, Record]] = {}
        self._records: list[Record] = []
        self._rejected = 0
        self._intervals = np.zeros(len(BUCKETS) + 1, np.int64)
        self._timeline: list[tuple[float, int, int, int, int]] = []
        self._steps = 0
        # What an infinite cache would find if everything came one by one: no order can find more.
        self._ideal: RadixTree[None] | None = RadixTree(make_root=lambda: None) if optimal else None
        self._ideal_cached = 0

    def run(self, progress: Progress = lambda done: None) -> Outcome:
        """To the end of the workload. `progress` hears how many requests have ended, now and then."""
        began = time.perf_counter()
        with contextlib.nullcontext() if self._media is None else self._media.files():
            while self._submit_due():
                if self.scheduler.resting:
                    self.clock.now += REST
                self.scheduler.step()
                if self._steps % 200 == 0:
                    progress(len(self._records) - len(self._open))
        progress(len(self._records))
        return self._outcome(time.perf_counter() - began)

    # ---- arrivals -------------------------------------------------------------------------------------------------

    def _submit_due(self) -> bool:
        """Send what has arrived; with nothing to do go on to the next arrival. False when all is over."""
        if self.scheduler.idle:
            at = self._soonest()
            if at is None:
                return False
            self._tiers.work_until(self.scheduler.components.memory, at)
            self.clock.now = max(self.clock.now, at)
        due = self._due()
        if due:
            self._send(due)
        return True

    def _soonest(self) -> float | None:
        times = [ask.at for ask in (self._next,) if ask is not None]
        if self._later:
            times.append(self._later[0][0])
        return min(times, default=None)

    def _due(self) -> list[Ask]:
        now, due = self.clock.now, []
        while self._next is not None and self._next.at <= now:
            due.append(self._next)
            self._next = next(self._asks, None)
        while self._later and self._later[0][0] <= now:
            due.append(heapq.heappop(self._later)[2])
        return due

    def _send(self, due: Sequence[Ask]) -> None:
        messages = []
        for ask in due:
            number, prompt = len(self.device.ends), ask.prompt()
            self.device.ends.append(ask.output_len)
            rid = str(number)
            record = Record(ask.group, ask.priority, ask.at, len(prompt))
            self._records.append(record)
            self._open[rid] = (ask, record)
            room = self.scheduler.max_context_len - len(prompt)
            params = SamplingParams(max_new_tokens=max(0, min(ask.limit, room)), temperature=0.0, seed=number)
            packed = prompt.astype("<i4").tobytes()
            media = None if self._media is None else self._media.request(ask.media, len(prompt))
            features = {} if media is None else {NAME: encoded(media)}
            messages.append(
                TokenizedRequest(rid=rid, prompt=packed, sampling=params, priority=ask.priority, features=features)
            )
        for reply in self.scheduler.receive([TokenizedBatch(requests=messages)]):
            if isinstance(reply, Rejected):
                self._rejected += 1
                del self._open[reply.rid]

    # ---- what the scheduler tells ---------------------------------------------------------------------------------

    def _committed(self, batch: ScheduleBatch) -> None:
        self._steps += 1
        intervals = batch.token_intervals
        if intervals is not None and batch.forward_mode is not ForwardMode.EXTEND:
            known = intervals[intervals > 0]
            np.add.at(self._intervals, np.searchsorted(BUCKETS, known), 1)
        if self._steps % TIMELINE_EVERY == 0:
            scheduler, memory = self.scheduler, self.scheduler.components.memory
            used = memory.held_tokens + memory.cache.locked_tokens
            self._timeline.append(
                (self.clock.now, len(scheduler.running), len(scheduler.waiting), used, memory.cache.cached_tokens)
            )

    def _finished(self, reqs: Sequence[Req]) -> None:
        for req in reqs:
            ask, record = self._open.pop(req.rid)
            times = req.timing
            record.output_len, record.cached = req.output_len, req.output.cached_tokens
            origins = req.output.cached_from
            record.cached_host, record.cached_storage = origins.get("host", 0), origins.get("storage", 0)
            record.retractions = req.output.num_retractions
            record.scheduled, record.first_token, record.finished = (
                times.first_scheduled, times.first_token, times.finished,
            )  # fmt: skip
            if ask.then is None and self._ideal is None:
                continue
            whole = req.tokens.view().copy()
            if self._ideal is not None:
                self._ideal_cached += self._seen_before(req.tokens.key_view().copy(), req.input_len)
            if ask.then is not None:
                for more in ask.then(self.clock.now, whole):
                    heapq.heappush(self._later, (more.at, next(self._order), more))

    def _seen_before(self, whole: NDArray[np.int64], prompt_len: int) -> int:
        """Return tokens of a prompt that an infinite cache has seen. Each new token is new to the one that comes first,
        so the sum does not depend on the order.
        """
        assert self._ideal is not None
        path = self._ideal.find(whole, "")
        # One token is always computed, and the last one of an answer never is.
        found = min(path.length, prompt_len - 1)
        if path.length < len(whole) - 1:
            self._ideal.extend(path, whole[:-1], None)
        return found

    # ---- the end --------------------------------------------------------------------------------------------------

    def _outcome(self, wall: float) -> Outcome:
        counters, scheduler = self.scheduler.counters, self.scheduler
        return Outcome(
            label=self.label,
            records=self._records,
            duration=self.clock.now,
            wall=wall,
            prefill_steps=counters.prefill_steps,
            decode_steps=counters.decode_steps,
            retractions=counters.retractions,
            preemptions=counters.preemptions,
            computed_tokens=counters.prompt_tokens,
            cached_tokens=sum(record.cached for record in self._records),
            optimal_cached=None if self._ideal is None else self._ideal_cached,
            policy=dict(scheduler.components.policy.stats()),
            intervals=self._intervals,
            timeline=np.array(self._timeline or np.empty((0, 5)), np.float64).reshape(-1, 5),
            total_tokens=scheduler.components.memory.total_tokens,
            rejected=self._rejected,
            encoding=None if self._media is None else self._media.figures(),
            accept_length=_accept_length(scheduler.components.points.reports.figures()) if self._rates else None,
            tiers=self._tiers.figures(),
            info={"book_errors": counters.book_errors},
        )


def _accept_length(figures: Mapping[str, float]) -> float:
    """Return the tokens that a request gained per step in which it had drafts."""
    return 1 + figures["accepted_tokens"] / max(1, figures["drafted_requests"])
