"""The scheduler: requests in, one batch per step, outputs out. One set of stages; this is the normal loop's driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
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
from pegboard.core.pipeline.admission import AddResult, NewTokenRatio, PrefillAdder
from pegboard.core.pipeline.arrivals import bad_length, new_req, refusal
from pegboard.core.pipeline.counters import Counters

if TYPE_CHECKING:
    from pegboard.core.config import SchedulerSection
    from pegboard.core.interfaces.batch import ModelWorkerBatch, ScheduleBatch
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.results import ResultStage
    from pegboard.core.pipeline.worker import BatchResult

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
    """Owns all requests. Not thread-safe: one loop calls `receive` and `step` in turn."""

    def __init__(
        self,
        config: SchedulerSection,
        memory: MemoryManager,
        policy: SchedulePolicy,
        builder: BatchBuilder,
        results: ResultStage,
        execute: Callable[[ModelWorkerBatch], BatchResult],
        *,
        chunk_size: int | None,
        max_context_len: int,
        eos_ids: frozenset[int] = frozenset(),
        hooks: StepHooks | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.memory = memory
        self.policy = policy
        self.builder = builder
        self.results = results
        self.execute = execute
        self.chunk_size = chunk_size
        self.max_context_len = max_context_len
        self.eos_ids = eos_ids
        self.hooks = hooks or StepHooks()
        self.counters = Counters()
        self.ratio = NewTokenRatio(
            start=config.new_token_ratio * config.conservativeness,
            floor=config.new_token_ratio_floor,
            decay_steps=config.new_token_ratio_decay_steps,
            clip=config.estimate_max_new_tokens,
        )
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        """The request whose prompt is computed in chunks and is not through yet; it is in neither list."""
        self.controls: dict[str, Control] = {
            "flush_cache": self._flush_cache,
            "info": lambda args: self.info(),
            "drain": self._drain,
        }
        """What `ControlRequest.action` may name; plugins add theirs through `EngineView.add_control`."""
        self._by_rid: dict[str, Req] = {}
        self._outbox: list[TokenOutput] = []
        self._last_was_prefill = False
        self._was_idle = True
        self._draining = False
        self._rng = np.random.default_rng(config.seed)

    # ---- messages -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running, and nothing is left to say."""
        return not self._by_rid and not self._outbox

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
        if refused is not None:
            self.counters.rejected += 1
            return refused
        req = new_req(message, self.eos_ids, self._rng, self.clock())
        self.counters.accepted += 1
        self._by_rid[req.rid] = req
        self.waiting.append(req)
        return Accepted(rid=req.rid)

    def _refusal(self, message: TokenizedRequest) -> Rejected | None:
        limit = self.config.max_queued_requests
        if self._draining:
            return refusal(message, 503, "shutting_down", "the server is shutting down, try another one")
        if message.rid in self._by_rid:
            return refusal(message, 400, "duplicate_rid", f"the request {message.rid!r} is still running", param="rid")
        if limit is not None and len(self.waiting) >= limit:
            return refusal(message, 503, "queue_full", f"{limit} requests are waiting, try again later")
        return bad_length(message, self.max_context_len)

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
            text = f"{message.action} failed: {type(error).__name__}: {error}"
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
        cache = self.memory.cache
        return {
            **self.counters.to_dict(),
            "waiting_requests": len(self.waiting),
            "running_requests": len(self.running) + (self.chunked is not None),
            "free_tokens": self.memory.allocator.free_tokens,
            "cached_tokens_now": cache.cached_tokens,
            "locked_tokens": cache.locked_tokens,
            "held_tokens": self.memory.held_tokens,
            "total_tokens": self.memory.total_tokens,
            "new_token_ratio": self.ratio.current,
        }

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Run one batch, if there is one; everything that is to be sent."""
        start = time.perf_counter()
        batch = self._next_batch()
        if batch is None:
            self._check_idle()
            return self._take_outbox()
        self._was_idle = False
        for hook in self.hooks.batch_scheduled:
            hook(batch)
        work = self.builder.worker_batch(batch)
        scheduled = time.perf_counter()
        try:
            result = self.execute(work)
        except Exception as error:
            # The state of these requests' KV is unknown, so they fail; nobody else was in the batch.
            logger.exception("batch %d of %d requests failed", batch.bid, len(batch))
            self._fail(batch, error)
            self._check_idle()
            return self._take_outbox()
        ran = time.perf_counter()
        self._commit(batch, result)
        counters = self.counters
        counters.schedule_time += scheduled - start
        counters.forward_time += ran - scheduled
        counters.results_time += time.perf_counter() - ran
        self._check_idle()
        return self._take_outbox()

    def _next_batch(self) -> ScheduleBatch | None:
        decode_turn = self._last_was_prefill and self.running and not self.config.prefill_first
        mixed = self.config.mixed_chunk and bool(self.running)
        if not decode_turn or mixed:
            batch = self._prefill(mixed)
            if batch is not None:
                self._last_was_prefill = True
                return batch
        self._last_was_prefill = False
        if not self._make_room():
            return None
        self.ratio.decay()
        self.counters.decode_steps += 1
        return self.builder.decode(self.running)

    def _prefill(self, mixed: bool) -> ScheduleBatch | None:
        if not self.waiting and self.chunked is None:
            return None
        if mixed and not self._make_room():
            mixed = False
        decoding = list(self.running) if mixed else []
        adder = PrefillAdder(
            self.memory,
            self.running,
            ratio=self.ratio,
            max_prefill_tokens=self.config.max_prefill_tokens,
            chunk_size=self.chunk_size,
            decode_tokens=len(decoding),
            max_new_rows=self.config.max_running_requests - len(self.running),
        )
        was_chunked = self.chunked
        if was_chunked is not None and not adder.add_chunked(was_chunked):
            return None
        self._admit(adder, was_chunked is not None and bool(adder.items) and adder.items[0].partial)
        if not adder.items:
            return None
        self.chunked = next((item.req for item in adder.items if item.partial), None)
        self.running += [item.req for item in adder.items if not item.partial]
        self.counters.prefill_steps += 1
        self.counters.prompt_tokens += sum(item.extend_len for item in adder.items)
        return self.builder.extend(adder.items, decoding)

    def _admit(self, adder: PrefillAdder, has_chunked: bool) -> None:
        """Offer waiting requests in the policy's order until one does not fit."""
        if adder.full() or not self.waiting or len(self.running) >= self.config.max_running_requests:
            return
        now = self.clock()
        admitted = set()
        for req in self.policy.order(self.waiting, self.running):
            if adder.add(req, has_chunked=has_chunked) is not AddResult.CONTINUE:
                break
            admitted.add(req.rid)
            req.move_to(ReqStatus.RUNNING)
            if not req.timing.first_scheduled:
                req.timing.first_scheduled = now
                req.output.cached_tokens = req.kv.prefix_len
                self.counters.cached_tokens += req.kv.prefix_len
            has_chunked = has_chunked or adder.items[-1].partial
            if adder.full():
                break
        if admitted:
            self.waiting = [req for req in self.waiting if req.rid not in admitted]

    def _make_room(self) -> bool:
        """Room for one more token of every running request, by retraction where eviction is not enough."""
        retracted = False
        while self.running and not self.memory.extend_each(self.running):
            retracted = True
            if len(self.running) > 1:
                self._retract(self.policy.victims(self.running)[0])
            elif self.chunked is not None:
                self._retract(self.chunked)
            else:
                message = f"KV memory of {self.memory.total_tokens} tokens cannot hold this request alone"
                self._end(self.running[0], FinishReason(FinishType.ABORT, message=message, status=500))
        if retracted:
            self.ratio.raise_after_retraction(self.running, self.config.retract_lookahead)
        return bool(self.running)

    def _retract(self, req: Req) -> None:
        """Back to the head of the waiting queue, output kept. Its KV stays in the cache until that memory is needed."""
        self.memory.release(req)
        req.output.num_retractions += 1
        req.move_to(ReqStatus.RETRACTED)
        self._drop(req)
        self.waiting.insert(0, req)
        self.counters.retractions += 1

    # ---- results --------------------------------------------------------------------------------------------------

    def _commit(self, batch: ScheduleBatch, result: BatchResult) -> None:
        finished = self.results.commit(batch, result)
        self.counters.generated_tokens += len(result.tokens)
        if not batch.forward_mode.is_decode:
            for req in batch.reqs[: len(batch.reqs) - batch.decoding]:
                if not req.finished:
                    self.memory.cache_unfinished(req)
        for req in batch.reqs:
            if (output := self.results.output(req)) is not None:
                self._outbox.append(output)
        for hook in self.hooks.batch_committed:
            hook(batch)
        if not finished:
            return
        for hook in self.hooks.requests_finished:
            hook(finished)
        for req in finished:
            self._forget(req)
        done = {id(req) for req in finished}
        self.running = [req for req in self.running if id(req) not in done]

    def _fail(self, batch: ScheduleBatch, error: Exception) -> None:
        self.counters.failed_batches += 1
        reason = FinishReason(FinishType.ABORT, message=f"the model failed: {error}", status=500)
        for req in batch.reqs:
            self._end(req, reason, keep=False)

    def _end(self, req: Req, reason: FinishReason, *, keep: bool = True) -> None:
        """Finish a request from outside a step, whatever its status, and free all that it has."""
        req.output.finish_reason = reason
        req.timing.finished = self.clock()
        self._drop(req)
        output = self.results.output(req)
        if output is not None:
            self._outbox.append(output)
        self.counters.aborted += 1
        for hook in self.hooks.requests_finished:
            hook([req])
        self._forget(req, keep=keep)

    def _forget(self, req: Req, *, keep: bool = True) -> None:
        self.memory.release(req, keep=keep)
        req.move_to(ReqStatus.FINISHED)
        del self._by_rid[req.rid]
        self.counters.finished += 1

    def _drop(self, req: Req) -> None:
        """Take a request out of whichever queue it is in."""
        if req is self.chunked:
            self.chunked = None
        for queue in (self.waiting, self.running):
            if req in queue:
                queue.remove(req)
                return

    def _take_outbox(self) -> list[TokenOutput]:
        outputs, self._outbox = self._outbox, []
        return outputs

    def _check_idle(self) -> None:
        if self._was_idle or self._by_rid:
            return
        self._was_idle = True
        self.ratio.current = self.ratio.start
        if error := self.memory.idle_error():
            self.counters.book_errors += 1
            logger.error("the books do not balance: %s", error)
        for hook in self.hooks.idle:
            hook()
