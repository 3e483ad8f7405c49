"""The scheduler: requests in, one batch per step, outputs out. One set of components, driven by one of two loops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.step import StageStep
from pegboard.core.pipeline.arrivals import QueueBounds
from pegboard.core.pipeline.counters import Counters
from pegboard.core.pipeline.executor import outcome
from pegboard.core.pipeline.guarded_source import brought_sources
from pegboard.core.pipeline.guards import GuardedHooks
from pegboard.core.pipeline.lifecycle import Lifecycle
from pegboard.core.pipeline.loops import NormalLoop, OverlapLoop
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.receive import Reception
from pegboard.core.pipeline.recovery import Recovery
from pegboard.core.pipeline.results import NOBODYS
from pegboard.core.pipeline.services import Services
from pegboard.core.pipeline.sources import Decode, Prefill
from pegboard.core.pipeline.stats import Stats
from pegboard.core.pipeline.step import Step
from pegboard.core.pipeline.unsampled import Unsampled, unsampled

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.interfaces.messages import FromScheduler, TokenOutput, ToScheduler
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import AnySource, BaseStep
    from pegboard.core.pipeline.components import Components, Limits
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.settings import SchedulerSettings

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs requests, a batch per step. Not thread-safe: one loop calls `receive` and `step` in turn.

    A step is launched (planned, and handed to the executor), settled (its result awaited) and committed (its tokens
    become the requests'); a step that failed is recovered. The parts: `planner` owns the queues, `requests` every
    request from beginning to end, `reception` what comes in, `stats` what is told.
    """

    def __init__(
        self, settings: SchedulerSettings, components: Components, limits: Limits, *, clock: Clock = time.monotonic
    ) -> None:
        self.settings = settings
        self.components = components
        self.max_context_len = limits.max_context_len
        self.counters = Counters()
        self.clock = clock
        self.planner = Planner(settings, components, limits, self.counters, clock)
        hooks = components.hooks
        self._batch_scheduled = GuardedHooks("batch_scheduled", hooks.batch_scheduled)
        self._batch_committed = GuardedHooks("batch_committed", hooks.batch_committed)
        requests_finished = GuardedHooks("requests_finished", hooks.requests_finished)
        self._idle_hooks = GuardedHooks("idle", hooks.idle)
        self.requests = Lifecycle(self.planner, components, self.counters, requests_finished, clock)
        self.planner.end = self.requests.end
        self.bounds = QueueBounds(
            settings.max_running_requests, components.memory.total_tokens, settings.max_queued_requests,
            settings.max_queued_tokens,
        )  # fmt: skip
        self.reception = Reception(self.requests, components, limits, self.bounds, self.counters, settings.seed, clock)
        self.controls["info"] = lambda args: self.info()
        all_hooks = (self._batch_scheduled, self._batch_committed, requests_finished, self._idle_hooks)
        self.stats = Stats(components, self.planner, all_hooks, self.bounds, self.counters)
        self.loop = self.requests.loop = (OverlapLoop if settings.loop == "overlap" else NormalLoop)(self)
        self.paused: set[str] = set()
        """Who has paused it: then no step is started (see `EngineView.pause`)."""
        self.on_step: Callable[[], None] | None = None  # called after every step; a profiler sets it
        components.points.connect(partial(self.requests.end, keep=False), components.memory, self.requests.alive)
        self._recovery = self._set_sources()
        self._unsampled = components.unsampled or Unsampled((), components.culprits, components.executor)
        self._finished_when_idle = 0  # how many requests had ended when it was idle last
        self._stuck = False  # whether nothing could be planned last time

    def _set_sources(self) -> Recovery:
        """Make the sources of steps, in the order in which they are asked, and what they recover with."""
        components, planner = self.components, self.planner
        recovery = Recovery(components, planner, self.requests, self.counters, self._commit)
        prefill = Prefill(planner, recovery, self._commit)
        own: list[AnySource] = [prefill, Decode(planner, recovery, self._commit)]
        planner.mixing = (prefill,)
        services = Services(components, planner, self.requests, recovery, self._commit, self._batch_scheduled)
        planner.set_sources(own, brought_sources(components.points, services))
        return recovery

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        """Take messages; every request is answered Accepted or Rejected, every control call with a ControlReply."""
        return self.reception.receive(messages)

    def info(self) -> dict[str, object]:
        """Return counters and the state of queues and memory, as plain values."""
        return self.stats.info(paused=bool(self.paused))

    @property
    def controls(self) -> dict[str, Control]:
        """What `ControlRequest.action` may name; plugins add theirs through `EngineView.add_control`."""
        return self.reception.controls

    @property
    def waiting(self) -> list[Req]:
        return self.planner.waiting

    @property
    def running(self) -> RunningBatch:
        return self.planner.running

    @property
    def idle(self) -> bool:
        """No request is here, nothing is under way, and nothing is left to say."""
        return not (self.requests.alive or self.requests.outbox or self.loop.in_flight or self.reception.later)

    @property
    def resting(self) -> bool:
        """Whether a step can wait some milliseconds: gates hold back or keep all requests, or all are parked, or the
        scheduler is paused.
        """
        planner = self.planner
        if self.requests.outbox or self.loop.in_flight is not None:
            return False
        if self.paused or (planner.parked and self._stuck):
            return True
        return not (planner.waiting or planner.running or planner.chunked or planner.under_way)

    @property
    def busy(self) -> bool:
        """Whether the cache moves pages, or others speak to a gate, so that these want to be asked again soon, even
        while the scheduler is idle.
        """
        gates = self.components.gates
        return self.components.memory.cache.busy or (gates is not None and gates.busy)

    def step(self) -> list[TokenOutput]:
        """Do one turn of the loop. Return everything that is to be sent."""
        requests, gates = self.requests, self.components.gates
        self.components.memory.guarded.poll()
        if gates is not None and gates:
            requests.ask_gates(gates)
        if self.planner.parked:
            requests.ask_constraints()
        self.loop.turn()
        if requests.late:
            requests.release_late()
        if self.on_step is not None:
            self.on_step()
        self._check_idle()
        outputs, requests.outbox = requests.outbox, []
        return outputs

    def launch(self, in_flight: BaseStep | None) -> BaseStep | None:
        """Plan the step after `in_flight` and start it. Return None where nothing can be planned (see Planner.plan)."""
        if self.paused:
            return None
        start, planned_at = time.perf_counter(), self.clock()
        self._stuck = (step := self.planner.plan(in_flight)) is None
        if step is None:
            return None
        if isinstance(step, StageStep):
            step.pending = self.components.executor.submit(step.work)
            return step
        assert isinstance(step, Step)
        step.batch.planned_at = planned_at
        if self._batch_scheduled and (step.work.part is None or step.work.part.first):
            self._batch_scheduled(step.batch)
        launched = time.perf_counter()
        step.launched_at = self.clock()
        step.pending = self.components.submit(step)
        counters = self.counters
        counters.schedule_time += launched - start - self.planner.tokens_ahead.take_seconds()
        counters.forward_time += time.perf_counter() - launched
        return step

    def settle(self, step: BaseStep, behind: BaseStep | None = None) -> bool:
        """Wait for a step and take its results. Return False where it failed, and with it `behind`, which was launched
        after it: then neither is under way any more.
        """
        start = time.perf_counter()
        result, error = outcome(step.pending)
        ran = time.perf_counter()
        if error is None:
            step.source.process_result(step, result)
        else:
            self._recovery.recover(step, error, behind)
        if isinstance(step, Step):
            self.counters.forward_time += ran - start
            self.counters.results_time += time.perf_counter() - ran
        return error is None

    def _commit(self, step: Step, result: BatchResult) -> None:
        """Give a step's tokens to their requests, share what was prefilled, and let go of those that have ended."""
        batch, components = step.batch, self.components
        ran = batch.forward_mode is not ForwardMode.PREBUILT
        if step.loads:
            for kv in step.kvs:
                components.memory.loaded(kv, True)
        components.points.arrived(step, result)
        finished, outputs = components.results.commit(step, result, self.running, self.clock())
        self.requests.outbox += outputs
        if result.unsampled:
            # Before anything is shared: their KV may be what is wrong.
            for req in unsampled(step, result):
                self.requests.end(req, self._unsampled.reason(req), keep=False)
        if ran:
            self.counters.generated_tokens += result.tokens.shape[0]
            if batch.tokens is not result.tokens and batch.tokens is not None:
                self.counters.generated_tokens -= int((batch.tokens == NOBODYS).sum())
        if not batch.forward_mode.is_decode:
            self.requests.share(step)
        components.points.commit(step, result)
        if self._batch_committed:
            self._batch_committed(batch)
        if components.report is not None and ran:
            self.stats.log(components.report, batch)
        if finished:
            self.requests.finished(finished)
        self.requests.follow_constraints()

    def _check_idle(self) -> None:
        """Check the books when the last request has gone."""
        finished = self.counters.finished
        if finished == self._finished_when_idle or self.requests.alive or self.loop.in_flight is not None:
            return
        self._finished_when_idle = finished
        self.planner.ratio.current = self.planner.ratio.start
        if error := self.components.memory.idle_error() or self.components.points.reports.idle_error():
            self.counters.book_errors += 1
            logger.error("the books do not balance: %s", error)
        if self.components.report is not None:
            self.components.report.rest()
        self._idle_hooks()
