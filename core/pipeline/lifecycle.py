"""Lifecycle: every request that is here, from its acceptance until all that it had is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.status import FinishReason, ReqStatus
from pegboard.core.pipeline.flags import CONSTRAINED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.messages import TokenOutput
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.components import Components
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.loops import Loop
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.step import Step


class Lifecycle:
    """Owns the requests by their ids. Others decide that one begins or ends; this one does it.

    `alive`: every request that has been accepted and not released. `outbox`: outputs that the next step sends.
    `late`: requests that ended while a source held them for launches to come; they are released after these.
    """

    def __init__(
        self, planner: Planner, components: Components, counters: Counters, ended_hooks: GuardedHooks, clock: Clock
    ) -> None:
        self.alive: dict[str, Req] = {}
        self.prompt_tokens = 0  # of all requests that are alive
        self.outbox: list[TokenOutput] = []
        self.late: list[Req] = []
        self.loop: Loop | None = None
        """Set by the scheduler: its step under way must hear that requests of it have ended."""
        self._planner = planner
        self._memory = components.memory
        self._results = components.results
        self._gates = components.gates
        self._counters = counters
        self._requests_finished = ended_hooks
        self._clock = clock

    def begin(self, req: Req) -> None:
        """Take a request in. It joins the queue unless a gate blocks it."""
        self.alive[req.rid] = req
        self.prompt_tokens += req.input_len
        if req.status is ReqStatus.WAITING:
            self.ready(req)

    def finished(self, finished: Sequence[Req]) -> None:
        """Let go of requests that results have ended."""
        # First, since only the running batch knows when each had its last token.
        self._planner.running.remove(finished)
        if self._requests_finished:
            self._requests_finished(finished)
        self._touch_flight()
        for req in finished:
            if self._is_held(req):
                req.move_to(ReqStatus.HELD)
            else:
                self._release(req)

    def end(self, req: Req, reason: FinishReason, *, keep: bool = True) -> None:
        """Finish a request for another reason than its tokens, whatever its status. All that it has is freed, but for
        what a source still needs (`late`) or a gate writes to. Does nothing for one that has ended, unless a gate holds
        it: then it is held no longer. Without `keep` none of its KV reaches the prefix cache.
        """
        if req.finished and req.status is not ReqStatus.HELD:
            return
        quarantined = False
        if self._gates is not None:
            if req.status is ReqStatus.HELD:
                if self._gates.drop(req):
                    self._release(req)
                return
            if req.status is ReqStatus.BLOCKED:
                quarantined, keep = self._gates.cancel(req), False
            elif self._gates.finish(req):
                self._gates.drop(req)
        held = self._planner.holds(req)
        self._stop(req, reason)
        self._touch_flight()
        self._counters.aborted += 1
        if self._requests_finished:
            self._requests_finished([req])
        if quarantined:
            req.move_to(ReqStatus.HELD)
        elif held:
            self.late.append(req)
        else:
            self._release(req, keep=keep)

    def release_late(self) -> None:
        """Release those that no source holds any more: all that they were held for is launched."""
        late, self.late = self.late, []
        for req in late:
            if self._planner.holds(req):
                self.late.append(req)
            else:
                self._release(req)

    def ask_gates(self, gates: GateKeeper) -> None:
        """Act on the gates' news: requests that have failed, need not be held any more, or may go on."""
        news = gates.poll()
        for req, reason in news.failed:
            self.end(req, reason)
        for req in news.released:
            # What ended before it was through has KV that is not all there.
            self._release(req, keep=req.output_len > 0)
        for req in news.ready:
            further = gates.passed(req)
            if isinstance(further, FinishReason):
                self.end(req, further)
            elif not further:
                req.move_to(ReqStatus.WAITING)
                self.ready(req)

    def share(self, step: Step) -> None:
        """Share what a step has computed, but for decodes. Of requests that have ended only where a gate may hold them
        for long: the others are shared as they are released.
        """
        gates = self._gates
        for req, kv in zip(step.prefilled, step.kvs, strict=False):
            if req.kv is kv and (not req.finished or (gates is not None and gates.leads(req))):
                self._memory.cache_unfinished(req)

    def follow_constraints(self) -> None:
        """Park the requests whose constraints need longer, and count the tokens that constraints have forced."""
        constraints = self._results.constraints
        later, constraints.later = constraints.later, []
        for req in later:
            # Some have been ended since, by a gate or for want of a token.
            if not req.finished:
                self._planner.park(req)
        more, constraints.forced_tokens = constraints.forced_tokens, 0
        self._counters.forced_tokens += more
        self._counters.generated_tokens += more

    def ask_constraints(self) -> None:
        """Take back the parked requests whose constraints have caught up."""
        results = self._results
        for req in list(self._planner.parked):
            if not req.flags & CONSTRAINED:
                continue
            reason = results.constraints.advance(req, req.tokens.last, results.finishers.of(req))
            if results.constraints.later:
                results.constraints.later.clear()
            elif reason is None:
                self._planner.resume(req)
            else:
                self._stop(req, reason)
                self.finished([req])

    def ready(self, req: Req) -> None:
        """Let a request into the queue that has passed all gates."""
        req.timing.ready = self._clock()
        self._planner.enqueue(req)

    def _is_held(self, req: Req) -> bool:
        """Tell the gates that a request has ended, and return whether one of them holds its KV. One that was retracted
        while its constraint worked has none.
        """
        gates = self._gates
        if gates is None or not gates.finish(req):
            return False
        if req.status is ReqStatus.RETRACTED:
            gates.drop(req)
            return False
        return True

    def _stop(self, req: Req, reason: FinishReason) -> None:
        req.output.finish_reason = reason
        req.timing.finished = self._clock()
        self._planner.drop(req)
        self._planner.reserved.discard(req)
        output = self._results.output(req)
        if output is not None:
            self.outbox.append(output)

    def _release(self, req: Req, *, keep: bool = True) -> None:
        # A step under way may still write to these pages; what they are given to next runs after it.
        self._memory.release(req, keep=keep)
        req.move_to(ReqStatus.FINISHED)
        del self.alive[req.rid]
        self._results.points.gone(req)
        self.prompt_tokens -= req.input_len
        self._counters.finished += 1

    def _touch_flight(self) -> None:
        """Tell the step under way that requests of it have ended, and that results for them are to be dropped."""
        in_flight = None if self.loop is None else self.loop.in_flight
        if in_flight is not None:
            in_flight.touched = True
