"""Planner: what the next step computes. Queues, admission, room for decodes, retraction, preemption."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.pipeline.admission import AddResult, NewTokenRatio, PrefillAdder, PrefillItem
from pegboard.core.pipeline.media.encoding import Encoding
from pegboard.core.pipeline.running import HISTORY, NEVER, RunningBatch
from pegboard.core.pipeline.split_prefill import SplitPrefill
from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.guards import GuardedPolicy
    from pegboard.core.pipeline.media.books import EncoderBooks
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.settings import SchedulerSettings
    from pegboard.core.pipeline.speculation.drafter import Drafter
    from pegboard.core.pipeline.speculation.drafts import Drafts
    from pegboard.core.pipeline.stages import Limits
    from pegboard.core.pipeline.step import Launched

GIVE_WAY_SECONDS = 0.5
"""A request that is parked for longer gives its memory to one that needs it; shorter, and it is back at once."""


class Planner:
    """Owns the queues: `waiting`, `running`, `chunked`, the request whose prompt is computed in chunks and is not
    through yet, `ahead`, running requests several of whose newest tokens are known and not computed, and `parked`,
    running requests that are in no batch until `resume`, each with the time since when. A parked request may have been
    retracted meanwhile. A request is in one of them.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        limits: Limits,
        memory: MemoryManager,
        policy: GuardedPolicy,
        builder: BatchBuilder,
        counters: Counters,
        clock: Clock,
        cannot_fit: Callable[[Req, FinishReason], None],
        media: EncoderBooks | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.settings = settings
        self.memory = memory
        self.drafter = drafter
        self.policy = policy
        self.builder = builder
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
        self.running = RunningBatch(settings.max_running_requests, builder.points.columns)
        self.chunked: Req | None = None
        self.ahead: list[Req] = []
        self.parked: dict[Req, float] = {}
        self.seated: set[Req] = set()  # blocked ones that have a place in memory
        self.split = SplitPrefill(builder, self.running, settings.split_prefill_layers, limits.num_layers)
        self.encoding = Encoding(media, builder, counters)
        self._cannot_fit = cannot_fit
        self._last_was_prefill = False
        self._must_settle = False
        self._short = False
        """Whether rows or memory kept a waiting request out of the last prefill that was planned."""

    # ---- the plan -------------------------------------------------------------------------------------------------

    def plan(self, flight: Launched | None) -> Launched | None:
        """Plan the next step, with its memory allocated; None where there is nothing to do.

        While a step is under way, `flight`, None may also mean that its results have to be known first: the caller
        settles it and asks again. So no request is retracted or preempted while a token of its own is on its way.
        """
        if flight is not None and (self.running.any(HISTORY) or self._waits_for_tokens(flight)):
            return None
        decoding = bool(self.running) or bool(self.ahead)
        decode_turn = self._last_was_prefill and decoding and not self.settings.prefill_first
        if self.split.step is not None and not decode_turn:
            self._last_was_prefill = True
            return self.split.next_part(self.split.step)
        # No decode waits for a piece of media and a chunk of a prompt.
        mixed = bool(self.settings.mixed_chunk and self.running) and not (decode_turn and self.encoding.was_last)
        if self.split.step is None and (not decode_turn or mixed):
            self._must_settle = False
            step = self._prefill(mixed, flight) or (None if decode_turn else self.encoding.plan())
            if step is not None:
                self._last_was_prefill = True
                return step
            if self._must_settle or (self.encoding.must_settle and flight is not None):
                return None
        return self._plan_decode(flight)

    def _plan_decode(self, flight: Launched | None) -> Step | None:
        """Plan a step that catches up with known tokens, else one that decodes, else the next part of a split
        prefill; None as in `plan`.
        """
        room = self._make_room(flight)
        if not room and flight is not None and self.running:
            return None  # and it is still the decodes' turn when the flight is settled
        if self.ahead:
            step = self._catch_up(room, flight)
            if step is not None:
                self._last_was_prefill = False
                self.counters.decode_steps += 1
            if step is not None or self.ahead:
                return step
        self._last_was_prefill = False
        if not room:
            return None if self.split.step is None else self.split.next_part(self.split.step)
        if (drafts := self._drafts()) is not None:
            step = self.builder.extend((), self.running, mixed=True, flight=NEVER, drafts=drafts)
        else:
            step = self.builder.decode(self.running, NEVER if flight is None else flight.number)
        if step is not None:
            self.ratio.decay()
            self.counters.decode_steps += 1
        elif self.split.step is not None:
            return self.split.next_part(self.split.step)
        return step

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def _waits_for_tokens(self, flight: Launched) -> bool:
        """Return whether drafts are verified in the step under way, or may be in the next one, so that its results have
        to be known first.
        """
        if self.drafter is None:
            return False
        return self.drafter.concerns(self.running) or (isinstance(flight, Step) and flight.drafts is not None)

    def _drafts(self) -> Drafts | None:
        """Return drafts for the running requests. No step may be under way."""
        return None if self.drafter is None else self.drafter.drafts(self.running)

    # ---- tokens that are known before they are computed -----------------------------------------------------------

    def run_ahead(self, req: Req) -> None:
        """Tokens of a running request have become known beyond the one that it sampled last: all of them are computed
        in its next step, in one go.
        """
        self.running.remove([req])
        req.kv.scheduled_len = req.kv.committed_len
        self.ahead.append(req)

    def park(self, req: Req) -> None:
        """Take a running request out of the batches, its newest token not computed, until `resume`. It keeps its memory
        for GIVE_WAY_SECONDS, and for as long after that as no other request needs it.
        """
        self.running.remove([req])
        req.kv.scheduled_len = req.kv.committed_len
        self.parked[req] = self.clock()

    def resume(self, req: Req) -> None:
        """Take back a parked request: it is in the next batch, or in the queue if it was retracted meanwhile."""
        del self.parked[req]
        if req.status is ReqStatus.RETRACTED:
            self.enqueue(req)
        else:
            self.ahead.append(req)

    @property
    def holding(self) -> list[Req]:
        """Parked requests that have memory; admission counts their growth."""
        return [req for req in self.parked if req.status is ReqStatus.RUNNING]

    def _gives_way(self) -> bool:
        """Retract a request that has been parked for long, for one that can use its memory now. False where there is
        none.
        """
        latest = self.clock() - GIVE_WAY_SECONDS
        found = [req for req in self.holding if self.parked[req] < latest]
        if found:
            self.retract(found[0])
        return bool(found)

    def _catch_up(self, mixed: bool, flight: Launched | None) -> Step | None:
        """Plan a step that computes what those ahead have gained, with the next token of all others (`mixed`). None
        where memory does not suffice: they wait again then, or the results of `flight` are wanted first.
        """
        items: list[PrefillItem] = []
        left = self.chunk_size or self.settings.max_prefill_tokens
        for req in list(self.ahead):
            done = req.kv.committed_len
            left -= req.seq_len - done
            if items and left < 0:
                break  # as many as a chunk; the others come with the next step
            if self.memory.extend(req, req.seq_len):
                req.kv.scheduled_len = req.seq_len
                items.append(PrefillItem(req, done, req.seq_len - done, partial=False))
            elif flight is None:
                self.retract(req)
        if not items:
            return None
        taken = {id(item.req) for item in items}
        self.ahead = [req for req in self.ahead if id(req) not in taken]
        return self.builder.extend(items, self.running, mixed=mixed, flight=NEVER if flight is None else flight.number)

    # ---- prefill --------------------------------------------------------------------------------------------------

    def abandon_split(self) -> None:
        """Undo the prefill that is under way in parts; its requests wait again."""
        if (step := self.split.take()) is not None:
            self.rewind(step)

    def _prefill(self, mixed: bool, flight: Launched | None) -> Step | None:
        self.encoding.begin(None)
        if not self.waiting and self.chunked is None:
            return None
        if mixed and not self._make_room(flight):
            mixed = False
        adder = PrefillAdder(
            self.memory,
            self.running,
            ratio=self.ratio,
            max_prefill_tokens=self.settings.max_prefill_tokens,
            chunk_size=self.chunk_size,
            decode_tokens=int((self.running.left > 0).sum()) if mixed else 0,
            # Rows are short where gates hold finished requests; the chunked one has its row already.
            max_new_rows=self.memory.rows.free_rows + (self.chunked is not None),
            max_load_tokens=self.settings.max_load_tokens,
            apart=(*self.ahead, *self.holding, *self.seated),
            media=self.encoding.books, points=self.builder.points,
        )  # fmt: skip
        self.encoding.begin(adder)
        was_chunked = self.chunked
        if was_chunked is not None and not self._goes_on(adder, was_chunked):
            return None
        self._admit(adder, was_chunked is not None and bool(adder.items) and adder.items[0].partial, flight)
        if not adder.items:
            if self._short and self.waiting:
                self._gives_way()
            return None
        self.chunked = next((item.req for item in adder.items if item.partial), None)
        self.counters.prefill_steps += 1
        self.counters.prompt_tokens += sum(item.extend_len for item in adder.items)
        number = NEVER if flight is None else flight.number
        split = bool(self.split.layers and self.running and not mixed)
        drafts = self._drafts() if mixed else None
        step = self.builder.extend(adder.items, self.running, mixed=mixed, flight=number, split=split, drafts=drafts)
        self.encoding.hold(step, adder)
        return self.split.begin(step) if split else step

    def _goes_on(self, adder: PrefillAdder, req: Req) -> bool:
        return adder.add_chunked(req) or (self.memory.trim(self.running) and adder.add_chunked(req))

    # ---- admission ------------------------------------------------------------------------------------------------

    def _admit(self, adder: PrefillAdder, has_chunked: bool, flight: Launched | None) -> None:
        """Offer waiting requests in the policy's order until one does not fit."""
        self._short = adder.rows_full
        if adder.full() or not self.waiting or (adder.rows_full and not self.policy.preempts):
            return
        now = self.clock()
        admitted: set[int] = set()
        for req in self.policy.order(self.waiting, self.running.reqs):
            if req.status not in _QUEUED:
                continue  # the policy named it twice
            result = adder.add(req, has_chunked=has_chunked)
            if result is AddResult.NO_TOKEN and self.memory.trim(self.running):
                result = adder.add(req, has_chunked=has_chunked)
            if result is AddResult.LATER or (result is AddResult.ENCODE and adder.may_wish):
                continue
            if result is not AddResult.CONTINUE and self._pushed_out(adder, req, result, flight, has_chunked):
                result = adder.add(req, has_chunked=has_chunked)
            if result is not AddResult.CONTINUE:
                self._short = adder.rows_full or result is AddResult.NO_TOKEN
                break
            admitted.add(id(req))
            self._admitted(adder.items[-1], now)
            has_chunked = has_chunked or adder.items[-1].partial
            if adder.full():
                break
        if admitted:
            self.waiting = [req for req in self.waiting if id(req) not in admitted]

    def _admitted(self, item: PrefillItem, now: float) -> None:
        item.req.move_to(ReqStatus.RUNNING)
        if not item.req.timing.first_scheduled:
            item.req.timing.first_scheduled = now
            self.counters.note_cached(item)

    def _pushed_out(
        self, adder: PrefillAdder, req: Req, result: AddResult, flight: Launched | None, has_chunked: bool
    ) -> bool:
        """Retract running requests so that `req` fits. Only where that is known to be enough."""
        if not self.policy.preempts or not (result is AddResult.NO_TOKEN or adder.rows_full):
            return False
        if not adder.could_take(req, has_chunked=has_chunked):
            return False
        running = self.running
        named = [one for one in self.policy.preempt(req, running.reqs) if one in running and one is not req]
        count = adder.makes_way(named, req)
        if not count:
            return False
        if flight is not None:
            self._must_settle = True
            return False
        for victim in named[:count]:
            adder.gave_way(victim)
            self.retract(victim)
            self.counters.preemptions += 1
        return True

    # ---- memory of the running ------------------------------------------------------------------------------------

    def _make_room(self, flight: Launched | None) -> bool:
        """Room for one more token of every running request, by retraction where eviction is not enough. False where
        no request is left to run, or where the results of `flight` are wanted first.
        """
        retracted = False
        while self.running and not self.memory.extend_running(self.running):
            if self.memory.trim(self.running) or self._gives_way():
                continue
            if flight is not None or (len(self.running) == 1 and self.split.step is not None):
                return False
            retracted = True
            if len(self.running) > 1:
                self.retract(self.policy.victims(self.running.reqs)[0])
            elif self.chunked is not None:
                self.retract(self.chunked)
            elif self.memory.rows.taken > 1:
                # The rest is with finished requests that a gate holds, and comes back.
                self.retract(self.running[0])
            else:
                message = f"KV memory of {self.memory.total_tokens} tokens cannot hold this request alone"
                self._cannot_fit(self.running[0], FinishReason(FinishType.ABORT, message=message, status=500))
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

    # ---- queues ---------------------------------------------------------------------------------------------------

    def enqueue(self, req: Req, *, first: bool = False) -> None:
        """Let a request wait for its turn."""
        req.timing.queued = self.clock()
        if first:
            self.waiting.insert(0, req)
        else:
            self.waiting.append(req)

    def drop(self, req: Req) -> None:
        """Take a request out of whichever queue it is in."""
        if self.split.step is not None and all(one.finished for one in self.split.step.batch.reqs):
            # No request wants the rest of it.
            self.encoding.release(self.split.step)
            self.split.take()
        if req is self.chunked:
            self.chunked = None
        elif req in self.ahead:
            self.ahead.remove(req)
        elif req in self.parked:
            del self.parked[req]
        elif req in self.running:
            self.running.remove([req])
        elif req in self.waiting:
            self.waiting.remove(req)

    def rewind(self, step: Step) -> None:
        """Undo a step that was launched and whose results are not going to be used. What it admitted waits again; the
        caller lets the running batch forget the rest (`RunningBatch.rewind`) once what came before is settled.
        """
        self.encoding.release(step)
        for req, kv in reversed(list(zip(step.prefilled, step.kvs, strict=False))):
            if req.finished or req.kv is not kv:
                continue  # gone, or back in the queue
            self.drop(req)
            self.memory.release(req)
            req.move_to(ReqStatus.RETRACTED)
            self.enqueue(req, first=True)


_QUEUED = frozenset({ReqStatus.WAITING, ReqStatus.RETRACTED})
