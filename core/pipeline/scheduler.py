"""The scheduler: requests in, one batch per step, outputs out. One set of stages; the loops that drive them are two."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    ToScheduler,
)
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.pipeline.arrivals import QueueBounds, bad_length, new_req, refusal
from pegboard.core.pipeline.counters import Counters
from pegboard.core.pipeline.culprits import Culprits
from pegboard.core.pipeline.executor import InlineExecutor
from pegboard.core.pipeline.guards import GuardedHooks, GuardedPolicy
from pegboard.core.pipeline.loops import make_loop
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.recovery import Recovery
from pegboard.core.pipeline.results import NOBODYS
from pegboard.core.registry.blame import in_words, text_of
from pegboard.core.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.config.sections import SchedulerSection
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.interfaces.pooler import Pooler
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.executor import Executor
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.results import ResultStage
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.step import BatchResult, Pending, Step
    from pegboard.core.pipeline.step_log import StepReport

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]


@dataclass(slots=True)
class StepHooks:
    """Frozen step hooks of the scheduler: empty tuples cost nothing."""

    batch_scheduled: tuple[Hook, ...] = ()
    batch_committed: tuple[Hook, ...] = ()
    requests_finished: tuple[Hook, ...] = ()
    idle: tuple[Hook, ...] = ()


class Scheduler:
    """Owns all requests. Not thread-safe: one loop calls `receive` and `step` in turn.

    `execute` runs a batch to its end; where `executor` is given, that does it, in a thread of its own perhaps.
    """

    def __init__(
        self,
        config: SchedulerSection,
        memory: MemoryManager,
        policy: SchedulePolicy,
        builder: BatchBuilder,
        results: ResultStage,
        execute: Callable[[Any], BatchResult],
        *,
        chunk_size: int | None,
        max_context_len: int,
        eos_ids: frozenset[int] = frozenset(),
        hooks: StepHooks | None = None,
        clock: Clock = time.monotonic,
        num_layers: int = 1,
        executor: Executor | None = None,
        gates: GateKeeper | None = None,
        report: StepReport | None = None,
        pooler: Pooler | None = None,
        culprits: Culprits | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.memory = memory
        self.policy = policy
        self.builder = builder
        self.results = results
        self.execute = execute
        # Looked up anew at each call, so that a test may put another one in its place.
        self.executor: Executor = executor or InlineExecutor(lambda work: self.execute(work))
        self.max_context_len = max_context_len
        self.eos_ids = eos_ids
        self.counters = Counters()
        self.guarded_policy = GuardedPolicy(policy)
        self.planner = Planner(
            config,
            memory,
            self.guarded_policy,
            builder,
            self.counters,
            clock,
            chunk_size=chunk_size,
            num_layers=num_layers,
            cannot_fit=self._end,
        )
        self.culprits = culprits or Culprits()
        self.gates = gates
        self.pooler = pooler
        self.report = report
        self.paused = False
        """While it is, no step is started (see operation.py)."""
        self.on_step: Callable[[], None] | None = None
        """Called after every step while it is set (a profiler sets it)."""
        self.loop = make_loop(config.loop, self)
        self._recovery = Recovery(builder, self.executor)
        hooks = hooks or StepHooks()
        self._batch_scheduled = GuardedHooks("batch_scheduled", hooks.batch_scheduled)
        self._batch_committed = GuardedHooks("batch_committed", hooks.batch_committed)
        self._requests_finished = GuardedHooks("requests_finished", hooks.requests_finished)
        self._idle_hooks = GuardedHooks("idle", hooks.idle)
        self.controls: dict[str, Control] = {
            "flush_cache": self._flush_cache,
            "info": lambda args: self.info(),
            "drain": self._drain,
        }
        """What `ControlRequest.action` may name; plugins add theirs through `EngineView.add_control`."""
        self.bounds = QueueBounds(
            config.max_running_requests, memory.total_tokens, config.max_queued_requests, config.max_queued_tokens
        )
        self._by_rid: dict[str, Req] = {}
        self._prompt_tokens = 0
        """Of the requests that are here."""
        self._outbox: list[TokenOutput] = []
        self._late: list[Req] = []
        """Requests that ended while some layers of their prefill were still to come; released when it is through."""
        self._was_idle = True
        self._stuck = False
        """Nothing could be planned last time."""
        self._cached_told = 0
        self._draining = False
        self._rng = np.random.default_rng(config.seed)

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

    # ---- queues, to be read ---------------------------------------------------------------------------------------

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
        return not self._by_rid and not self._outbox and self.loop.flight is None

    @property
    def resting(self) -> bool:
        """All requests that are here are held back or kept by gates, or wait for those that sit out, or the scheduler
        is paused: a step can wait some milliseconds.
        """
        planner = self.planner
        if self.paused or (planner.sitting and self._stuck):
            return not self._outbox and self.loop.flight is None
        return not (
            planner.waiting
            or planner.running
            or planner.ahead
            or planner.chunked
            or planner.split
            or self._outbox
            or self.loop.flight is not None
        )

    @property
    def _blocked(self) -> int:
        return 0 if self.gates is None else self.gates.blocked

    # ---- messages -------------------------------------------------------------------------------------------------

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        """Take messages; every request is answered Accepted or Rejected, every control call with a ControlReply."""
        replies: list[FromScheduler] = []
        for message in messages:
            if isinstance(message, TokenizedRequest):
                replies.append(self._accept(message))
            elif isinstance(message, TokenizedBatch):
                replies.extend(self._accept(one) for one in message.requests)
            elif isinstance(message, AbortRequest):
                self._abort(message)
            elif isinstance(message, ControlRequest):
                replies.append(self._control(message))
        return replies

    def _accept(self, message: TokenizedRequest) -> Accepted | Rejected:
        refused = self._refusal(message)
        if refused is None:
            req = new_req(message, self.eos_ids, self._rng, self.clock())
            refused = self._examine(req, message)
        if refused is not None:
            self.counters.rejected += 1
            return refused
        self.counters.accepted += 1
        self._by_rid[req.rid] = req
        self._prompt_tokens += req.input_len
        if req.status is ReqStatus.WAITING:
            self._ready(req)
        return Accepted(rid=req.rid)

    def _examine(self, req: Req, message: TokenizedRequest) -> Rejected | None:
        """Plugins' first look at a request. Whatever they raise is its own affair."""
        try:
            req.flags = self.builder.flags(req)
        except InvalidRequest as error:
            return refusal(message, error.status, error.code, error.message, param=error.param or "")
        except Exception as error:
            return self._plugin_failed(message, "a logits processor or the sampler", error)
        if req.pooling is not None:
            if self.pooler is None:
                return refusal(message, 400, "no_embeddings", "this engine makes no embeddings")
            try:
                req.pooling.first = self.pooler.first(req.input_len)
            except Exception as error:
                return self._plugin_failed(message, "the pooler", error)
        failed = None if self.gates is None else self.gates.arrive(req)
        if failed is not None:
            return refusal(message, failed.status, failed.code, failed.reason, param=failed.param)
        return None

    def _plugin_failed(self, message: TokenizedRequest, who: str, error: Exception) -> Rejected:
        """A plugin raised on a new request, which is refused for it."""
        culprit = self.culprits.of(error)
        self.culprits.count(culprit)
        text = f"{who} failed: {in_words(error)}" if culprit is None else culprit.tell(error)
        accused = text if culprit is None else culprit.accuse(error)
        logger.error("request %s is refused: %s", quoted(message.rid), accused, exc_info=error)
        return refusal(message, 500, "plugin_failed", text)

    def _ready(self, req: Req) -> None:
        req.timing.ready = self.clock()
        self.planner.enqueue(req)

    def _refusal(self, message: TokenizedRequest) -> Rejected | None:
        if self._draining:
            return refusal(message, 503, "shutting_down", "the server is shutting down, try another one")
        if message.rid in self._by_rid:
            return refusal(message, 400, "duplicate_rid", f"the request {message.rid!r} is still running", param="rid")
        held = 0 if self.gates is None else self.gates.held
        return bad_length(message, self.max_context_len) or self.bounds.refuse(
            message, len(self._by_rid) - held, self._prompt_tokens
        )

    def _abort(self, message: AbortRequest) -> None:
        reason = FinishReason(FinishType.ABORT, message="aborted by the client", status=499)
        targets = list(self._by_rid.values()) if message.all_requests else [self._by_rid.get(message.rid)]
        for req in targets:
            if req is not None:
                self._end(req, reason)

    def _control(self, message: ControlRequest) -> ControlReply:
        run = self.controls.get(message.action)
        try:
            if run is None:
                raise InvalidRequest(f"unknown control action {message.action!r}", code="unknown_action", status=404)
            return ControlReply(call_id=message.call_id, ok=True, payload=run(message.args))
        except InvalidRequest as error:
            problem = {"message": str(error), "status": error.status, "code": error.code, "param": error.param}
        except Exception as error:
            logger.exception("the control action %r failed", message.action)
            text = f"{message.action} failed: {in_words(error)}"
            problem = {"message": text, "status": 500, "code": "control_failed"}
        return ControlReply(call_id=message.call_id, ok=False, payload=problem)

    def _flush_cache(self, args: dict[str, Any]) -> dict[str, Any]:
        if self._by_rid:
            raise InvalidRequest("requests are waiting or running, so the cache is in use", code="busy", status=409)
        self.memory.cache.reset()
        return {}

    def _drain(self, args: dict[str, Any]) -> dict[str, Any]:
        self._draining = True
        return {}

    def info(self) -> dict[str, Any]:
        """Counters and the state of queues and memory, as plain values."""
        cache, failures = self.memory.cache, self._plugin_failures()
        return {
            **self.counters.to_dict(),
            "paused": self.paused,
            "waiting_requests": len(self.waiting),
            "running_requests": self._running_requests,
            "blocked_requests": self._blocked,
            "held_requests": 0 if self.gates is None else self.gates.held,
            "free_tokens": self.memory.allocator.free_tokens,
            "cached_tokens_now": cache.cached_tokens,
            "locked_tokens": cache.locked_tokens,
            "held_tokens": self.memory.held_tokens,
            "total_tokens": self.memory.total_tokens,
            "max_queued_requests": self.bounds.requests,
            "max_queued_tokens": self.bounds.tokens,
            "new_token_ratio": self.planner.ratio.current,
            "gates": [] if self.gates is None else self.gates.waiting_on(),
            "plugin_failures": sum(count for by_name in failures.values() for count in by_name.values()),
            "plugin_failures_by": failures,
            "policy": self._policy_stats(),
        }

    @property
    def _running_requests(self) -> int:
        planner = self.planner
        return len(self.running) + len(planner.ahead) + len(planner.sitting) + (self.chunked is not None)

    def _plugin_failures(self) -> dict[str, dict[str, int]]:
        """Calls of plugins that raised, by contract and provider; of hooks, by the hook's name."""
        hooks = (self._batch_scheduled, self._batch_committed, self._requests_finished, self._idle_hooks)
        gates = {} if self.gates is None else self.gates.failures_by
        return self.culprits.all_counts(
            ("prefix_cache", self.memory.cache_name, self.memory.cache_errors),
            ("schedule_policy", self.culprits.name(self.policy), self.guarded_policy.failures),
            *(("admission_gate", name, failures) for name, failures in gates.items()),
            *(("hooks", one.name, one.failures) for one in hooks),
        )

    def _policy_stats(self) -> dict[str, float]:
        try:
            return dict(self.policy.stats())
        except Exception:
            logger.exception("%s.stats raised", type(self.policy).__name__)
            return {}

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Get on by one batch, if there is one; everything that is to be sent."""
        if self.gates is not None and self.gates:
            self._ask_gates(self.gates)
        if self.planner.sitting:
            self._ask_matchers()
        self.loop.turn()
        if self._late and self.planner.split is None:
            self._release_late()
        if self.on_step is not None:
            self.on_step()
        self._check_idle()
        outputs, self._outbox = self._outbox, []
        return outputs

    def launch(self, flight: Step | None) -> Step | None:
        """Plan the next step behind `flight` and start it; None where nothing can be planned (see Planner.plan)."""
        if self.paused:
            return None
        start = time.perf_counter()
        planned_at = self.clock()
        step = self.planner.plan(flight)
        self._stuck = step is None
        if step is None:
            return None
        self._was_idle = False
        step.batch.planned_at = planned_at
        if self._batch_scheduled and (step.work.part is None or step.work.part.first):
            self._batch_scheduled(step.batch)
        launched = time.perf_counter()
        step.pending = self.executor.submit(step.work)
        counters = self.counters
        counters.schedule_time += launched - start
        counters.forward_time += time.perf_counter() - launched
        return step

    def settle(self, step: Step, behind: Step | None = None) -> bool:
        """Wait for a step and take its results. False where it failed, and with it `behind`, which was launched after
        it: then neither is under way any more.
        """
        assert step.pending is not None
        start = time.perf_counter()
        result, error = _outcome(step.pending)
        ran = time.perf_counter()
        self.counters.forward_time += ran - start
        if result is not None:
            if step.final:
                self._commit(step, result)
        else:
            assert error is not None
            self._recover(step, error, behind)
        self.counters.results_time += time.perf_counter() - ran
        return result is not None

    def _commit(self, step: Step, result: BatchResult) -> None:
        batch = step.batch
        finished, outputs = self.results.commit(step, result, self.running, self.clock())

        self.counters.generated_tokens += len(step.sampled)
        if batch.tokens is not result.tokens and batch.tokens is not None:
            self.counters.generated_tokens -= int((batch.tokens == NOBODYS).sum())
        if not batch.forward_mode.is_decode:
            prefilled = len(batch.reqs) - batch.decoding
            for req, kv in zip(batch.reqs[:prefilled], step.kvs, strict=False):
                if not req.finished and req.kv is kv:
                    self.memory.cache_unfinished(req)
        self._outbox += outputs
        if self._batch_committed:
            self._batch_committed(batch)
        if self.report is not None:
            self._tell(self.report, batch)
        if finished:
            self._finished(finished)
        sitting, self.results.sitting_out = self.results.sitting_out, []
        self.counters.grammar_waits += len(sitting)
        for req, token in sitting:
            self.planner.sit_out(req)
            self.results.work.sit_out(req, token)
        more = self.results.forced_tokens - self.counters.forced_tokens
        if more:
            self.counters.forced_tokens += more
            self.counters.generated_tokens += more
            gained, self.results.ahead = self.results.ahead, []
            for req in gained:
                self.planner.run_ahead(req)

    def _finished(self, finished: Sequence[Req]) -> None:
        if self._requests_finished:
            self._requests_finished(finished)
        self.running.remove(finished)
        self._touch_flight()
        for req in finished:
            if self.gates is not None and self.gates.finish(req):
                req.move_to(ReqStatus.HELD)
            else:
                self._release(req)

    def _touch_flight(self) -> None:
        """Requests have ended: what is under way for them is nobody's."""
        flight = self.loop.flight
        if flight is not None:
            flight.touched = True

    # ---- failure --------------------------------------------------------------------------------------------------

    def _recover(self, step: Step, error: Exception, behind: Step | None) -> None:
        """A forward pass raised. What it computed is undefined, but nothing of it was committed."""
        self.counters.failed_batches += 1
        culprit = self.culprits.of(error)
        self.culprits.count(culprit)
        accused = "the model failed" if culprit is None else culprit.accuse(error)
        logger.error("batch %d of %d requests: %s", step.number, len(step.batch), accused, exc_info=error)
        self.memory.rows.send_again(step.work.table)
        if behind is not None:
            assert behind.pending is not None
            _outcome(behind.pending)
            self.memory.rows.send_again(behind.work.table)
        if step.whole is not None:
            # A part of a split prefill: all of it is computed again, in one go.
            step = step.whole
            self.planner.end_split(step)
        for part, result, why in self._recovery.parts(step, error):
            if result is not None:
                self._commit(part, result)
                continue
            culprit = self.culprits.of(why)
            text = f"the model failed: {text_of(why)}" if culprit is None else culprit.tell(why)
            reason = FinishReason(FinishType.ABORT, message=text, status=500)
            for req in part.batch.reqs:
                if not req.finished:
                    self._end(req, reason, keep=False)
        # Only now: a request whose chunk failed may have its next one in the step behind, and has to be tried first.
        if behind is not None and behind.batch is not step.batch:
            if behind.final:
                self.planner.rewind(behind)
            elif any(req.rid in step.batch.partial for req in behind.batch.reqs):
                # The first layers of a split prefill, which have read what the failed chunk was to write.
                self.planner.abandon_split()
        self.running.rewind()

    # ---- the end of requests --------------------------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason, *, keep: bool = True) -> None:
        """Finish a request from outside a step, whatever its status, and free all that it has."""
        if self.gates is not None:
            if req.status is ReqStatus.HELD:
                self.gates.drop(req)
                self._release(req)
                return
            if req.status is ReqStatus.BLOCKED:
                self.gates.cancel(req)
            elif self.gates.finish(req):
                self.gates.drop(req)
        if req.finished:
            return
        splitting = self.planner.splits(req)
        req.output.finish_reason = reason
        req.timing.finished = self.clock()
        self.planner.drop(req)
        self._touch_flight()
        output = self.results.output(req)
        if output is not None:
            self._outbox.append(output)
        self.counters.aborted += 1
        if self._requests_finished:
            self._requests_finished([req])
        if splitting:
            self._late.append(req)
        else:
            self._release(req, keep=keep)

    def _release(self, req: Req, *, keep: bool = True) -> None:
        self.memory.release(req, keep=keep)
        req.move_to(ReqStatus.FINISHED)
        del self._by_rid[req.rid]
        self._prompt_tokens -= req.input_len
        self.counters.finished += 1

    def _release_late(self) -> None:
        """The prefill that was writing to their slots is through, or all of it is launched."""
        late, self._late = self._late, []
        for req in late:
            self._release(req)

    # ---- between steps --------------------------------------------------------------------------------------------

    def _ask_gates(self, gates: GateKeeper) -> None:
        news = gates.poll()
        for req in news.ready:
            req.move_to(ReqStatus.WAITING)
            self._ready(req)
        for req, reason in news.failed:
            self._end(req, reason)
        for req in news.released:
            self._release(req)

    def _ask_matchers(self) -> None:
        """Take back the requests whose matchers have caught up."""
        for req, reason in self.results.work.take_done():
            if req.finished:
                continue
            if reason is None:
                self.planner.come_back(req)
                continue
            self.planner.drop(req)
            req.output.finish_reason = reason
            req.timing.finished = self.clock()
            output = self.results.output(req)
            if output is not None:
                self._outbox.append(output)
            self._finished([req])

    def _check_idle(self) -> None:
        if self._was_idle or self._by_rid or self.loop.flight is not None:
            return
        self._was_idle = True
        self.planner.ratio.current = self.planner.ratio.start
        if error := self.memory.idle_error():
            self.counters.book_errors += 1
            logger.error("the books do not balance: %s", error)
        if self.report is not None:
            self.report.rest()
        self._idle_hooks()

    def _tell(self, report: StepReport, batch: ScheduleBatch) -> None:
        """Log lines: of every prefill, and now and then of decodes."""
        if not batch.forward_mode.is_decode:
            if report.talks:
                told, self._cached_told = self._cached_told, self.counters.cached_tokens
                report.prefill(
                    requests=len(batch.reqs) - batch.decoding,
                    new_tokens=batch.num_tokens - batch.decoding,
                    cached_tokens=self.counters.cached_tokens - told,
                    running=len(self.running),
                    queued=len(self.waiting),
                    used_tokens=self._used_tokens,
                )
        elif report.decode_due(self.counters.generated_tokens):
            report.decode(running=len(self.running), queued=len(self.waiting), used_tokens=self._used_tokens)

    @property
    def _used_tokens(self) -> int:
        """Tokens in pages that nobody else could have: held by requests, or locked in the cache."""
        return self.memory.held_tokens + self.memory.cache.locked_tokens


def _outcome(pending: Pending) -> tuple[BatchResult | None, Exception | None]:
    try:
        return pending.result(), None
    except Exception as error:
        return None, error
