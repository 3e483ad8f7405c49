"""Planner: what the next step computes. Queues, admission, room for decodes, retraction (for want of memory; vLLM's
preemption) and preemption (retraction for a more urgent request).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch import PrefillItem
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.interfaces.step import SETTLE
from pegboard.core.pipeline.admission import PrefillAdder
from pegboard.core.pipeline.flags import HISTORY
from pegboard.core.pipeline.growth import NewTokenRatio
from pegboard.core.pipeline.guards import GuardedPolicy
from pegboard.core.pipeline.looking_ahead import TokensAhead
from pegboard.core.pipeline.running import RunningBatch
from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import AnySource, BaseStep
    from pegboard.core.pipeline.ahead import Ahead
    from pegboard.core.pipeline.components import Components, Limits
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.settings import SchedulerSettings

GIVE_WAY_SECONDS = 0.5
"""A request that is parked for longer gives its memory to one that needs it; shorter, and it is back at once."""


class Planner:
    """Owns the queues: `waiting`, `running`, `chunked`, the request whose prompt is computed in chunks and is not
    through yet, and `parked`, running requests that are in no batch until `resume`, each with the time since when. A
    parked request may have been retracted meanwhile. No request is in two of them; those that are blocked, held or
    ended, or in a prefill with launches to come, are in none.
    """

    def __init__(
        self, settings: SchedulerSettings, components: Components, limits: Limits, counters: Counters, clock: Clock
    ) -> None:
        self.settings = settings
        self.memory = components.memory
        self.tokens_ahead = TokensAhead(components)
        self.end: Callable[[Req, FinishReason], None]  # for what memory can never hold; set by the scheduler
        self.policy = GuardedPolicy(components.policy)
        self.builder = builder = components.builder
        self.counters = counters
        self.clock = clock
        self.chunk_size = limits.chunk_size
        self.ratio = NewTokenRatio(
            start=settings.new_token_ratio * settings.conservativeness,
            floor=settings.new_token_ratio_floor,
            decay_steps=settings.new_token_ratio_decay_steps,
            clip=settings.estimate_max_new_tokens,
        )
        self.waiting: list[Req] = []
        self.running = RunningBatch(settings.max_running_requests, builder.vocab_size, builder.points.columns)
        self.running.lanes = components.executor.lanes if settings.loop == "overlap" else 1
        self.chunked: Req | None = None
        self.parked: dict[Req, float] = {}
        self.reserved: set[Req] = set()  # blocked ones for which memory is reserved
        self.prefills: tuple[AnySource, ...] = ()  # of the turn of prefills, in the order in which they are asked
        self.mixing: tuple[AnySource, ...] = ()  # those of them that may mix decodes into their batches
        self.decodes: tuple[AnySource, ...] = ()
        self._last_was_prefill = False
        self._last_was_batch = True

    def set_sources(self, own: Sequence[AnySource], brought: Sequence[AnySource]) -> None:
        """Set the sources of steps: the core's own, and those that stages bring."""
        sources = sorted((*own, *brought), key=lambda source: not source.first)
        self.prefills = tuple(one for one in sources if one.turn == "prefill")
        self.decodes = tuple(one for one in sources if one.turn == "decode")

    def plan(self, in_flight: BaseStep | None) -> BaseStep | None:
        """Plan the next step, with its memory allocated; None where there is nothing to do.

        While a step is under way, `in_flight`, None may also mean that its results have to be known first: the caller
        settles it and asks again. So no request is retracted or preempted while a token of its own is on its way.
        """
        if in_flight is not None and self._waits_for_tokens(in_flight):
            return None
        if self.builder.points.beginning:
            self.builder.points.begin_plan()
        for prefills, sources in self._turns():
            settle = False
            for source in sources:
                step = source.next(in_flight)
                if step is SETTLE:
                    settle = True
                elif step is not None:
                    self._last_was_prefill, self._last_was_batch = prefills, isinstance(step, Step)
                    return step
            if settle:
                return None
            self._last_was_prefill &= prefills
        return None

    def _turns(self) -> Iterator[tuple[bool, Sequence[AnySource]]]:
        """Yield whom to ask, and whether they prefill: prefills and then decodes, or decodes alone after a prefill.
        Where nothing is to be decoded, what is under way goes on.
        """
        if not (self._last_was_prefill and self.running) or self.settings.prefill_first:
            yield True, self.prefills
        elif self.settings.mixed_chunk and self.running and self._last_was_batch:
            # Both in one batch; but no decode waits for a stage's own work and a chunk of a prompt.
            yield True, self.mixing
        yield False, self.decodes
        yield False, [step.source for step in self.under_way]

    @property
    def sources(self) -> Iterator[AnySource]:
        """All of them."""
        return itertools.chain(self.prefills, self.decodes)

    @property
    def under_way(self) -> list[BaseStep]:
        """Steps that take several launches, some of which are still to come."""
        return [step for source in self.sources if (step := source.under_way) is not None]

    def holds(self, req: Req) -> bool:
        """Return whether a source needs a request's memory for launches that are to come."""
        return any(source.holds(req) for source in self.sources)

    def abandon(self) -> None:
        """Give up what is under way in several launches; its requests wait again."""
        for step in self.under_way:
            step.source.undo(step)

    def _waits_for_tokens(self, in_flight: BaseStep) -> bool:
        """Return whether the results of the step under way have to be known first: some request's tokens have to be
        known before its next step, or it may gain several tokens, or a stage wants to go on from what it gains.
        """
        has_ahead = isinstance(in_flight, Step) and in_flight.ahead is not None
        waits = has_ahead or (self.running.lanes == 1 and self.running.waits_for(in_flight.number, HISTORY))
        return waits or self.builder.points.must_settle(self.running.reqs, in_flight)

    def ahead(self, in_flight: BaseStep | None) -> Ahead | None:
        """Return tokens ahead of the running requests; None while a step is under way."""
        return None if in_flight is not None else self.tokens_ahead.plan(self.running)

    def park(self, req: Req) -> None:
        """Take a running request out of the batches, its newest token not computed, until `resume`. It keeps its memory
        for GIVE_WAY_SECONDS, and for as long after that as no other request needs it.
        """
        self.running.remove([req])
        req.kv.scheduled_len = req.kv.committed_len
        self.parked[req] = self.clock()

    def resume(self, req: Req) -> None:
        """Take back a parked request: it is in the next batch, or first in the queue if it was retracted meanwhile."""
        del self.parked[req]
        if req.status is ReqStatus.RETRACTED:
            self.enqueue(req, first=True)
        else:
            self.running.join([req])

    @property
    def holding(self) -> list[Req]:
        """Parked requests that have memory; admission counts their growth."""
        return [req for req in self.parked if req.status is ReqStatus.RUNNING]

    def gives_way(self) -> bool:
        """Retract a request that has been parked for long, for one that can use its memory now. False where there is
        none.
        """
        latest = self.clock() - GIVE_WAY_SECONDS
        found = [req for req in self.holding if self.parked[req] < latest]
        if found:
            self.retract(found[0])
        return bool(found)

    def catching_up(self) -> list[PrefillItem]:
        """Return what running requests with several known tokens have to compute: for as many as a chunk holds, the
        others follow in the next step.
        """
        items: list[PrefillItem] = []
        left = self.chunk_size or self.settings.max_prefill_tokens
        for place in self.running.catching_up().tolist():
            gap, known = int(self.running.gaps[place]), int(self.running.known_lens[place])
            left -= gap
            if items and left < 0:
                break
            items.append(PrefillItem(self.running[place], known - gap, gap, partial=False))
        return items

    def adder(self, mixed: bool) -> PrefillAdder:
        """Return what collects the next prefill, with decodes `mixed` in or not."""
        return PrefillAdder(
            self.memory,
            self.running,
            ratio=self.ratio,
            max_prefill_tokens=self.settings.max_prefill_tokens,
            chunk_size=self.chunk_size,
            decode_tokens=self.running.decoding().shape[0] if mixed else 0,
            # Rows are short where gates hold finished requests.
            max_new_rows=self.memory.rows.free_rows,
            max_load_tokens=self.settings.max_load_tokens,
            apart=(*self.holding, *self.reserved),
            points=self.builder.points,
        )

    def make_room(self, in_flight: BaseStep | None) -> bool:
        """Room for all that running requests have to compute, by retraction where eviction is not enough. False where
        no request is left to run, or where the results of `in_flight` are wanted first.
        """
        retracted = False
        while self.running and not self.memory.extend_running(self.running):
            if self.memory.trim(self.running) or self.gives_way():
                continue
            if in_flight is not None or (len(self.running) == 1 and self.under_way):
                return False
            retracted = True
            if len(self.running) > 1:
                self.retract(self.policy.victims(self.running.reqs)[0])
            elif self.chunked is not None:
                self.retract(self.chunked)
            elif self.memory.rows.taken > 1:
                # Others have the rest (parked, held, ended late, or blocked with memory), and it comes back.
                self.retract(self.running[0])
            else:
                message = f"KV memory of {self.memory.total_tokens} tokens cannot hold this request alone"
                self.end(self.running[0], FinishReason(FinishType.ABORT, message=message, status=500))
        if retracted:
            self.ratio.raise_after_retraction(self.running, self.settings.retract_lookahead)
        return bool(self.running)

    def retract(self, req: Req) -> None:
        """Back to the head of the waiting queue, output kept. Its KV stays in the cache until that memory is needed."""
        parked_at = self.parked.get(req)
        self.drop(req)
        self.memory.release(req)
        req.output.num_retractions += 1
        req.move_to(ReqStatus.RETRACTED)
        if parked_at is None:
            self.enqueue(req, first=True)
        else:
            self.parked[req] = parked_at
        self.counters.retractions += 1

    def enqueue(self, req: Req, *, first: bool = False) -> None:
        """Let a request wait for its turn."""
        req.timing.queued = self.clock()
        if first:
            self.waiting.insert(0, req)
        else:
            self.waiting.append(req)

    def drop(self, req: Req) -> None:
        """Take a request out of whichever queue it is in."""
        for step in self.under_way:
            if all(one.finished for one in step.reqs):
                step.source.undo(step)  # no request wants the rest of it
        if req is self.chunked:
            self.chunked = None
        elif req in self.parked:
            del self.parked[req]
        elif req in self.running:
            self.running.remove([req])
        elif req in self.waiting:
            self.waiting.remove(req)

    def rewind(self, step: Step) -> None:
        """Undo a step whose results are not going to be used. What it admitted, and what catches up in it, waits again;
        the caller lets the running batch forget the rest (`RunningBatch.rewind`) once what came before is settled.
        """
        for req, kv in reversed(list(zip(step.prefilled, step.kvs, strict=False))):
            if req.finished or req.kv is not kv:
                continue  # gone, or back in the queue
            self.drop(req)
            self.memory.release(req)
            req.move_to(ReqStatus.RETRACTED)
            self.enqueue(req, first=True)

    def closed(self, step: Step) -> None:
        """Tell stages that a step is through, or is not going to run."""
        self.builder.points.closed(step)
