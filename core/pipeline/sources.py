"""The core's own sources of steps: prefills and decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.interfaces.step import SETTLE, BaseStep, Settle, StepSource
from pegboard.core.pipeline.admission import AddResult, PrefillAdder
from pegboard.core.pipeline.running import NEVER
from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.recovery import Recovery

_SHORT = frozenset({AddResult.NO_TOKEN, AddResult.SHORT})
_QUEUED = frozenset({ReqStatus.WAITING, ReqStatus.RETRACTED})


class BatchSource(StepSource[Step, BatchResult]):
    """What sources of batches have in common. `commit` gives a step's tokens to its requests."""

    def __init__(self, planner: Planner, recovery: Recovery, commit: Callable[[Step, BatchResult], None]) -> None:
        self._planner = planner
        self._recovery = recovery
        self._commit = commit

    def process_result(self, step: Step, result: BatchResult) -> None:
        self._commit(step, result)
        self._close(step)

    def failed(self, step: Step, error: Exception) -> None:
        self._recovery.halve(step, error)
        self._close(step)

    def undo(self, step: Step) -> None:
        self._planner.rewind(step)
        self._close(step)

    def _close(self, step: Step) -> None:
        self._planner.closed(step)


class Decode(BatchSource):
    """Steps that compute one token of each running request, and tokens ahead; of those with several known ones, all."""

    turn: Literal["prefill", "decode"] = "decode"

    def next(self, in_flight: BaseStep | None) -> BaseStep | Settle | None:
        planner = self._planner
        if not planner.make_room(in_flight):
            return SETTLE if in_flight is not None and planner.running else None
        step = self._build(in_flight)
        if step is not None:
            planner.ratio.decay()
            planner.counters.decode_steps += 1
            step.source = self
        return step

    def _build(self, in_flight: BaseStep | None) -> Step | None:
        planner, number = self._planner, NEVER if in_flight is None else in_flight.number
        if items := planner.catching_up():
            return planner.builder.extend(items, planner.running, mixed=True, stamp=number)
        if (ahead := planner.ahead(in_flight)) is not None:
            return planner.builder.extend((), planner.running, mixed=True, stamp=NEVER, ahead=ahead)
        return planner.builder.decode(planner.running, number)


class Prefill(BatchSource):
    """Steps that compute prompts, in chunks where these are long; with `mixed_chunk` decodes are in the same batch."""

    _must_settle = False
    _short = False
    """Whether rows or memory kept a waiting request out of the last prefill that was planned."""

    def next(self, in_flight: BaseStep | None) -> BaseStep | Settle | None:
        self._must_settle = False
        if not self._planner.waiting and self._planner.chunked is None:
            return None
        return self._plan(in_flight) or (SETTLE if self._must_settle else None)

    def _plan(self, in_flight: BaseStep | None) -> Step | None:
        planner = self._planner
        mixed = bool(planner.settings.mixed_chunk and planner.running)
        if mixed and not planner.make_room(in_flight):
            if in_flight is not None:
                self._must_settle = True  # no prefill takes what the decodes lack, and leaves them out
                return None
            mixed = False
        adder = planner.adder(mixed)
        passed = None
        if planner.chunked is not None:
            result = self._go_on(adder, planner.chunked)
            if result is AddResult.LATER:
                passed = planner.chunked
            elif result is not AddResult.CONTINUE:
                if result in _SHORT:
                    planner.gives_way()
                return None
        self._admit(adder, passed is not None or any(item.partial for item in adder.items), in_flight)
        if not adder.items:
            if self._short and planner.waiting:
                planner.gives_way()
            return None
        planner.chunked = next((item.req for item in adder.items if item.partial), passed)
        planner.counters.prefill_steps += 1
        planner.counters.prompt_tokens += sum(item.extend_len for item in adder.items)
        return self._build(adder, mixed, in_flight)

    def _build(self, adder: PrefillAdder, mixed: bool, in_flight: BaseStep | None) -> Step:
        """Make the batch, or let a source that takes this prefill begin with it."""
        planner = self._planner
        taker = None if mixed else next((one for one in planner.sources if one.takes(adder.items)), None)
        step = planner.builder.extend(
            adder.items,
            planner.running,
            mixed=mixed,
            stamp=NEVER if in_flight is None else in_flight.number,
            split=taker is not None,
            ahead=planner.ahead(in_flight) if mixed else None,
        )
        step.source = self
        return step if taker is None else taker.begin(step)

    def _go_on(self, adder: PrefillAdder, chunked: Req) -> AddResult:
        result = adder.add_chunked(chunked)
        if result is AddResult.NO_TOKEN and self._planner.memory.trim(self._planner.running):
            result = adder.add_chunked(chunked)
        return result

    def _admit(self, adder: PrefillAdder, has_chunked: bool, in_flight: BaseStep | None) -> None:
        """Offer waiting requests in the policy's order until one does not fit."""
        planner = self._planner
        self._short = adder.rows_full
        if adder.full() or not planner.waiting or (adder.rows_full and not planner.policy.preempts):
            return
        now = planner.clock()
        admitted: set[int] = set()
        for req in planner.policy.order(planner.waiting, planner.running.reqs):
            if req.status not in _QUEUED:
                continue  # the policy named it twice
            result = adder.add(req, has_chunked=has_chunked)
            if result is AddResult.NO_TOKEN and planner.memory.trim(planner.running):
                result = adder.add(req, has_chunked=has_chunked)
            while result is not AddResult.CONTINUE and self._pushed_out(adder, req, result, in_flight, has_chunked):
                result = adder.add(req, has_chunked=has_chunked)
            if result is AddResult.LATER:
                continue
            if result is not AddResult.CONTINUE:
                self._short = adder.rows_full or result in _SHORT
                break
            admitted.add(id(req))
            self._admitted(adder.items[-1], now)
            has_chunked = has_chunked or adder.items[-1].partial
            if adder.full():
                break
        if admitted:
            planner.waiting = [req for req in planner.waiting if id(req) not in admitted]

    def _admitted(self, item: PrefillItem, now: float) -> None:
        item.req.move_to(ReqStatus.RUNNING)
        if not item.req.timing.first_scheduled:
            item.req.timing.first_scheduled = now
            self._planner.counters.note_cached(item)

    def _pushed_out(
        self, adder: PrefillAdder, req: Req, result: AddResult, in_flight: BaseStep | None, has_chunked: bool
    ) -> bool:
        """Retract running requests for `req`: as many as are known to suffice, one for a stage, which is then asked."""
        planner = self._planner
        if not planner.policy.preempts or not (result in _SHORT or adder.rows_full):
            return False
        if not adder.could_take(req, has_chunked=has_chunked):
            return False
        running = planner.running
        named = [one for one in planner.policy.preempt(req, running.reqs) if one in running and one is not req]
        count = adder.makes_way(named, req)
        if not count:
            return False
        if in_flight is not None:
            self._must_settle = True
            return False
        for victim in named[:count]:
            adder.gave_way(victim)
            planner.retract(victim)
            planner.counters.preemptions += 1
        return True
