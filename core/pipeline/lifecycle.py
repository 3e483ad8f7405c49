"""Lifecycle: every request that is here, from its acceptance until all that it had is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.status import FinishReason, ReqStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.messages import TokenOutput
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.loops import Loop
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.results import ResultStage


class Lifecycle:
    """Owns the requests by their ids. The other stages decide that one begins or ends; this one does it.

    `alive`: every request that has been accepted and not released. `outbox`: outputs that the next step sends.
    `late`: requests that ended while some layers of their prefill were still to come; they are released after it.
    """

    def __init__(
        self,
        planner: Planner,
        memory: MemoryManager,
        results: ResultStage,
        counters: Counters,
        gates: GateKeeper | None,
        requests_finished: GuardedHooks,
        clock: Clock,
    ) -> None:
        self.alive: dict[str, Req] = {}
        self.prompt_tokens = 0
        """Of all requests that are alive."""
        self.outbox: list[TokenOutput] = []
        self.late: list[Req] = []
        self.loop: Loop | None = None
        """Set by the scheduler: its step under way must hear that requests of it have ended."""
        self._planner = planner
        self._memory = memory
        self._results = results
        self._counters = counters
        self._gates = gates
        self._requests_finished = requests_finished
        self._clock = clock

    def begin(self, req: Req) -> None:
        """Take a request in. It joins the queue unless a gate blocks it."""
        self.alive[req.rid] = req
        self.prompt_tokens += req.input_len
        if req.status is ReqStatus.WAITING:
            self._ready(req)

    def finished(self, finished: Sequence[Req]) -> None:
        """Let go of requests that results have ended."""
        if self._requests_finished:
            self._requests_finished(finished)
        self._planner.running.remove(finished)
        self._touch_flight()
        for req in finished:
            if self._gates is not None and self._gates.finish(req):
                req.move_to(ReqStatus.HELD)
            else:
                self._release(req)

    def end(self, req: Req, reason: FinishReason, *, keep: bool = True) -> None:
        """Finish a request from outside a step, whatever its status, and free all that it has.

        Without `keep` none of its KV reaches the prefix cache.
        """
        if self._gates is not None:
            if req.status is ReqStatus.HELD:
                self._gates.drop(req)
                self._release(req)
                return
            if req.status is ReqStatus.BLOCKED:
                self._gates.cancel(req)
            elif self._gates.finish(req):
                self._gates.drop(req)
        if req.finished:
            return
        splitting = self._planner.split.holds(req)
        self._stop(req, reason)
        self._touch_flight()
        self._counters.aborted += 1
        if self._requests_finished:
            self._requests_finished([req])
        if splitting:
            self.late.append(req)
        else:
            self._release(req, keep=keep)

    def release_late(self) -> None:
        """Release those that ended during a split prefill. It is through, or all of it is launched."""
        late, self.late = self.late, []
        for req in late:
            self._release(req)

    def ask_gates(self, gates: GateKeeper) -> None:
        """Act on the gates' news: requests that may go on, have failed, or need not be held any more."""
        news = gates.poll()
        for req in news.ready:
            req.move_to(ReqStatus.WAITING)
            self._ready(req)
        for req, reason in news.failed:
            self.end(req, reason)
        for req in news.released:
            self._release(req)

    def ask_matchers(self) -> None:
        """Take back the requests whose matchers have caught up."""
        for req, reason in self._results.grammars.work.take_done():
            if req.finished:
                continue
            if reason is None:
                self._planner.come_back(req)
                continue
            self._stop(req, reason)
            self.finished([req])

    def _ready(self, req: Req) -> None:
        req.timing.ready = self._clock()
        self._planner.enqueue(req)

    def _stop(self, req: Req, reason: FinishReason) -> None:
        req.output.finish_reason = reason
        req.timing.finished = self._clock()
        self._planner.drop(req)
        output = self._results.output(req)
        if output is not None:
            self.outbox.append(output)

    def _release(self, req: Req, *, keep: bool = True) -> None:
        self._memory.release(req, keep=keep)
        req.move_to(ReqStatus.FINISHED)
        del self.alive[req.rid]
        self.prompt_tokens -= req.input_len
        self._counters.finished += 1

    def _touch_flight(self) -> None:
        """Tell the step under way that requests of it have ended, and that results for them are to be dropped."""
        flight = None if self.loop is None else self.loop.flight
        if flight is not None:
            flight.touched = True
