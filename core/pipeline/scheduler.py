"""The scheduler: requests in, one batch per step, outputs out. One set of stages; the loops that drive them are two."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.forward import LoadFailed
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.arrivals import QueueBounds
from pegboard.core.pipeline.counters import Counters
from pegboard.core.pipeline.guards import GuardedHooks, GuardedPolicy
from pegboard.core.pipeline.lifecycle import Lifecycle
from pegboard.core.pipeline.loops import make_loop
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.receive import Reception
from pegboard.core.pipeline.recovery import Recovery, encode_apart
from pegboard.core.pipeline.results import NOBODYS
from pegboard.core.pipeline.seats import Seats
from pegboard.core.pipeline.stats import Stats
from pegboard.core.pipeline.step import EncodeStep
from pegboard.core.pipeline.unsampled import Unsampled, unsampled
from pegboard.core.registry.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.interfaces.messages import FromScheduler, TokenOutput, ToScheduler
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.batch_result import BatchResult
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.settings import SchedulerSettings
    from pegboard.core.pipeline.stages import Limits, Stages
    from pegboard.core.pipeline.step import Launched, Pending, Step

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs requests, a batch per step. Not thread-safe: one loop calls `receive` and `step` in turn.

    A step is launched (planned, and handed to the executor), settled (its result awaited) and committed (its tokens
    become the requests'); a step that failed is recovered. The parts: `planner` owns the queues, `requests` every
    request from beginning to end, `reception` what comes in, `stats` what is told.
    """

    def __init__(
        self, settings: SchedulerSettings, stages: Stages, limits: Limits, *, clock: Clock = time.monotonic
    ) -> None:
        self.settings = settings
        self.stages = stages
        self.max_context_len = limits.max_context_len
        self.counters = Counters()
        self.clock = clock
        self.guarded_policy = GuardedPolicy(stages.policy)
        self.planner = Planner(
            settings, limits, stages.memory, self.guarded_policy, stages.builder, self.counters, clock,
            self._cannot_fit, stages.books, stages.drafter,
        )  # fmt: skip
        hooks = stages.hooks
        self._batch_scheduled = GuardedHooks("batch_scheduled", hooks.batch_scheduled)
        self._batch_committed = GuardedHooks("batch_committed", hooks.batch_committed)
        requests_finished = GuardedHooks("requests_finished", hooks.requests_finished)
        self._idle_hooks = GuardedHooks("idle", hooks.idle)
        self.requests = Lifecycle(
            self.planner, stages.memory, stages.results, self.counters, stages.gates, requests_finished, clock
        )
        self.bounds = QueueBounds(
            settings.max_running_requests, stages.memory.total_tokens, settings.max_queued_requests,
            settings.max_queued_tokens,
        )  # fmt: skip
        self.reception = Reception(self.requests, stages, limits, self.bounds, self.counters, settings.seed, clock)
        self.controls["info"] = lambda args: self.info()
        all_hooks = (self._batch_scheduled, self._batch_committed, requests_finished, self._idle_hooks)
        self.stats = Stats(stages, self.planner, self.guarded_policy, all_hooks, self.bounds, self.counters)
        self.seats = Seats(self.planner, stages, self.requests, clock, (self._batch_scheduled, self._batch_committed))
        self.loop = self.requests.loop = make_loop(settings.loop, self)
        self.paused = False
        """While it is, no step is started (see `pegboard.core.engine.operation`)."""
        self.on_step: Callable[[], None] | None = None
        """Called after every step while it is set (a profiler sets it)."""
        self._recovery = Recovery(stages)
        stages.points.connect(partial(self.requests.end, keep=False), stages.memory)
        self._unsampled = stages.unsampled or Unsampled((), 0, stages.culprits, stages.executor)
        self._was_idle = True
        self._stuck = False  # whether nothing could be planned last time

    def bound_queue(self, requests: int, fills: int) -> QueueBounds:
        """Bound what may wait, as far as the config leaves it open: so many requests, and tokens that fill KV memory so
        many times.
        """
        self.bounds.requests = self.bounds.requests or requests
        self.bounds.tokens = self.bounds.tokens or fills * self.bounds.memory
        return self.bounds

    def set_on_step(self, call: Callable[[], None] | None) -> None:
        """Call this after every step from now on; None: nothing."""
        self.on_step = call

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        """Take messages; every request is answered Accepted or Rejected, every control call with a ControlReply."""
        return self.reception.receive(messages)

    def info(self) -> dict[str, object]:
        """Return counters and the state of queues and memory, as plain values."""
        return self.stats.info(paused=self.paused)

    # ---- to be read -----------------------------------------------------------------------------------------------

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
    def chunked(self) -> Req | None:
        """The request whose prompt is computed in chunks and is not through yet; it is in neither queue."""
        return self.planner.chunked

    @property
    def idle(self) -> bool:
        """No request is here, nothing is under way, and nothing is left to say."""
        return not self.requests.alive and not self.requests.outbox and self.loop.flight is None

    @property
    def resting(self) -> bool:
        """Whether a step can wait some milliseconds: gates hold back or keep all requests, or all are parked, or the
        scheduler is paused.
        """
        planner = self.planner
        if self.requests.outbox or self.loop.flight is not None:
            return False
        if self.paused or (planner.parked and self._stuck):
            return True
        return not (planner.waiting or planner.running or planner.ahead or planner.chunked or planner.split.step)

    @property
    def busy(self) -> bool:
        """Whether the cache moves pages, or others speak to a gate, so that these want to be asked again soon, even
        while the scheduler is idle.
        """
        gates = self.stages.gates
        return self.stages.memory.busy or (gates is not None and gates.busy)

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Get on by one batch, if there is one. Return everything that is to be sent."""
        requests, gates = self.requests, self.stages.gates
        self.stages.memory.poll()
        if gates is not None and gates:
            for req, arrived in requests.ask_gates(gates):
                self.seats.join(req, arrived)
            if gates.seats:
                self.seats.fill(gates, self.loop.flight)
        if self.planner.parked:
            requests.ask_matchers()
        self.loop.turn()
        if requests.late and self.planner.split.step is None:
            requests.release_late()
        if self.on_step is not None:
            self.on_step()
        self._check_idle()
        outputs, requests.outbox = requests.outbox, []
        return outputs

    def launch(self, flight: Launched | None) -> Launched | None:
        """Plan the step after `flight` and start it. Return None where nothing can be planned (see Planner.plan)."""
        if self.paused:
            return None
        start = time.perf_counter()
        planned_at = self.clock()
        step = self.planner.plan(flight)
        self._stuck = step is None
        if step is None:
            return None
        self._was_idle = False
        if isinstance(step, EncodeStep):
            step.pending = self.stages.executor.encode(step.work)
            return step
        step.batch.planned_at = planned_at
        if self._batch_scheduled and (step.work.part is None or step.work.part.first):
            self._batch_scheduled(step.batch)
        launched = time.perf_counter()
        step.launched_at = self.clock()
        step.pending = self.stages.submit(step)
        counters, drafter = self.counters, self.stages.drafter
        drafting = 0.0 if drafter is None else drafter.take_seconds()
        counters.draft_time += drafting
        counters.schedule_time += launched - start - drafting
        counters.forward_time += time.perf_counter() - launched
        return step

    def settle(self, step: Launched, behind: Launched | None = None) -> bool:
        """Wait for a step and take its results. Return False where it failed, and with it `behind`, which was launched
        after it: then neither is under way any more.
        """
        if isinstance(step, EncodeStep):
            return self._settle_encode(step, behind)
        assert step.pending is not None
        start = time.perf_counter()
        result, error = _outcome(step.pending)
        ran = time.perf_counter()
        self.counters.forward_time += ran - start
        if result is not None:
            took = self.clock() - step.launched_at
            if step.final:
                self._commit(step, result)
                if self.stages.drafter is not None:
                    self.stages.drafter.learn(step, took)
        else:
            assert error is not None
            self._recover(step, error, behind)
        if step.final or result is None:
            self.planner.encoding.release(step if step.whole is None else step.whole)
        self.counters.results_time += time.perf_counter() - ran
        return result is not None

    def _settle_encode(self, step: EncodeStep, behind: Launched | None) -> bool:
        assert step.pending is not None
        try:
            seconds = step.pending.result()
        except Exception as error:
            self._recover_encode(step, error, behind)
            return False
        self.counters.encode_time += seconds
        if self.stages.report is not None:
            self.stats.log_encode(self.stages.report, step.work, seconds)
        return True

    def _commit(self, step: Step, result: BatchResult) -> None:
        """Give a step's tokens to their requests, share what was prefilled, and let go of those that have ended."""
        batch, stages = step.batch, self.stages
        if step.work.loads:
            for kv in step.kvs:
                stages.memory.loaded(kv, True)
        stages.points.arrived(step, result)
        finished, outputs = stages.results.commit(step, result, self.running, self.clock())
        self.requests.outbox += outputs
        if result.unsampled:
            # Before anything is shared: their KV may be what is wrong.
            for req in unsampled(step, result):
                self.requests.end(req, self._unsampled.reason(req), keep=False)

        self.counters.generated_tokens += result.tokens.shape[0]
        if batch.tokens is not result.tokens and batch.tokens is not None:
            self.counters.generated_tokens -= int((batch.tokens == NOBODYS).sum())
        if batch.trees is not None and batch.gained is not None:
            self.counters.note_drafts(batch.trees.counts, batch.gained)
        if not batch.forward_mode.is_decode:
            self.requests.share(step)
        stages.points.commit(step, result)
        if self._batch_committed:
            self._batch_committed(batch)
        if stages.report is not None:
            self.stats.log(stages.report, batch)
        if finished:
            self.requests.finished(finished)
        self.requests.follow_grammars()

    # ---- failure --------------------------------------------------------------------------------------------------

    def _recover(self, step: Step, error: Exception, behind: Launched | None) -> None:
        """Recover from a forward pass that raised. What it computed is undefined, but nothing of it was committed."""
        self._note_failure(step.number, f"{len(step.batch)} requests", error)
        self.stages.memory.rows.send_again(step.work.table)
        late = None if behind is None else self._wait_for(behind)
        if step.whole is not None:
            # A part of a split prefill: all of it is computed again, in one go.
            step = step.whole
            self.planner.split.end(step)
        lost = isinstance(error, LoadFailed)
        if lost:
            self.stages.memory.load_failed()
        else:
            self._try_in_parts(step, error)
        # Only now: a request whose chunk failed may have its next one in the step after, and has to be tried first.
        if isinstance(behind, EncodeStep):
            if late is not None:
                self._recover_encode(behind, late, None)
        elif behind is not None and behind.batch is not step.batch:
            if behind.final:
                self.planner.rewind(behind)
            elif late is not None or any(req.rid in step.batch.partial for req in behind.batch.reqs):
                # The first layers of a split prefill. They failed too, or have read what the failed chunk was to write.
                self.planner.abandon_split()
        if lost:
            # No request is to blame: what it admitted waits again, and is loaded or computed then.
            self.planner.rewind(step)
        self.running.rewind()

    def _recover_encode(self, step: EncodeStep, error: Exception, behind: Launched | None) -> None:
        """Recover from an encoder that raised: its pieces are encoded one by one. Requests that want one which fails
        alone end with status 500. A file that is gone does not count as a failure: its request may have ended.
        """
        books = self.stages.books
        assert books is not None
        if not isinstance(error, OSError):
            self._note_failure(step.number, f"{len(step.work.pieces)} pieces of media", error)
        late = None if behind is None else self._wait_for(behind)
        for wanting, why in encode_apart(step, books, self.stages.executor):
            reason = FinishReason(FinishType.ABORT, message=self._told(why), status=500, code="media_failed")
            for req in wanting:
                self.requests.end(req, reason, keep=False)
        if isinstance(behind, EncodeStep):
            if late is not None:
                self._recover_encode(behind, late, None)
        elif behind is not None:
            if behind.final:
                self.planner.rewind(behind)
            else:
                self.planner.abandon_split()
        self.running.rewind()

    def _told(self, why: Exception) -> str:
        """Return what clients learn of media that cannot be encoded."""
        if isinstance(why, OSError):
            logger.error("a file of media cannot be read: %s", why)
            return "the media of this request were lost; try again"
        culprit = self.stages.culprits.of(why)
        return f"encoding media failed: {text_of(why)}" if culprit is None else culprit.tell(why)

    def _note_failure(self, number: int, what: str, error: Exception) -> None:
        self.counters.failed_batches += 1
        culprit = self.stages.culprits.of(error)
        self.stages.culprits.count(culprit)
        plain = str(error) if isinstance(error, LoadFailed) else "the model failed"
        accused = plain if culprit is None else culprit.accuse(error)
        logger.error("batch %d of %s: %s", number, what, accused, exc_info=error)

    def _wait_for(self, behind: Launched) -> Exception | None:
        """Wait for a step whose results may be of no use; what it raised."""
        if isinstance(behind, EncodeStep):
            assert behind.pending is not None
            try:
                self.counters.encode_time += behind.pending.result()
            except Exception as error:
                return error
            return None
        assert behind.pending is not None
        _, failed = _outcome(behind.pending)
        self.stages.memory.rows.send_again(behind.work.table)
        return failed

    def _try_in_parts(self, step: Step, error: Exception) -> None:
        """Run a failed step again in halves, until the requests at fault are alone; they end with status 500."""
        for part, result, why in self._recovery.parts(step, error):
            if result is not None:
                self._commit(part, result)
                continue
            if isinstance(why, LoadFailed):
                self.planner.rewind(part)
                continue
            culprit = self.stages.culprits.of(why)
            text = f"the model failed: {text_of(why)}" if culprit is None else culprit.tell(why)
            reason = FinishReason(FinishType.ABORT, message=text, status=500)
            for req in part.batch.reqs:
                if not req.finished:
                    self.requests.end(req, reason, keep=False)

    def _cannot_fit(self, req: Req, reason: FinishReason) -> None:
        """End a request that memory can never hold."""
        self.requests.end(req, reason)

    # ---- between steps --------------------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        """Check the books when the last request has gone."""
        if self._was_idle or self.requests.alive or self.loop.flight is not None:
            return
        self._was_idle = True
        self.planner.ratio.current = self.planner.ratio.start
        books = self.stages.books
        if error := self.stages.memory.idle_error() or (books and books.idle_error()):
            self.counters.book_errors += 1
            logger.error("the books do not balance: %s", error)
        if self.stages.report is not None:
            self.stages.report.rest()
        self._idle_hooks()


def _outcome(pending: Pending) -> tuple[BatchResult | None, Exception | None]:
    try:
        return pending.result(), None
    except Exception as error:
        return None, error
