"""Seats: blocked requests that have a place in memory already, for KV that a gate brings, and how they join."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.admission_gate import Seat
from pegboard.core.interfaces.batch import ScheduleBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.pipeline.admission import PrefillAdder
from pegboard.core.pipeline.verdicts import misfit
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import Arrived
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.stages import Stages
    from pegboard.core.pipeline.step import Launched

logger = logging.getLogger(__name__)


class Seats:
    """Gives blocked requests a row and pages when their gate asks for it, and lets them join when it has filled these.

    A seat counts in admission as a running request does. Its pages may have belonged to a request that has ended, whose
    last step is still under way and writes to them; for other requests the order of steps takes care of that, but what
    a gate brings comes from outside. So a gate learns of a seat when the step is settled that was under way at its
    allocation.
    """

    def __init__(
        self,
        planner: Planner,
        stages: Stages,
        requests: Lifecycle,
        clock: Clock,
        hooks: tuple[GuardedHooks, GuardedHooks],
    ) -> None:
        self._planner = planner
        self._memory = stages.memory
        self._stages = stages
        self._requests = requests
        self._clock = clock
        self._batch_scheduled, self._batch_committed = hooks
        self._settling: list[tuple[Req, Launched]] = []
        """Those that have their pages, and the step that was under way then."""

    def fill(self, gates: GateKeeper, flight: Launched | None) -> None:
        """Seat the requests whose gates ask for it, as far as there is room, while the step `flight` is under way."""
        settling, self._settling = self._settling, []
        for req, since in settling:
            if since is flight:
                self._settling.append((req, since))
            elif req in self._planner.seated:
                self._tell(gates, req)
        asking = gates.asking()
        if not asking or any(req.status is ReqStatus.RETRACTED for req in self._planner.waiting):
            return  # what was taken from a running request is its own by right
        adder = self._adder()
        for req in asking:
            if not adder.place(req, has_chunked=self._planner.chunked is not None):
                return
            self._planner.seated.add(req)
            if flight is None:
                self._tell(gates, req)
            else:
                self._settling.append((req, flight))

    def join(self, req: Req, arrived: Arrived | None) -> None:
        """Let a request go on that had a seat, or may have had one, with what a gate has brought for it."""
        planner, memory, now = self._planner, self._memory, self._clock()
        seated = req.kv.row != NO_ROW
        planner.seated.discard(req)
        if arrived is None:
            memory.release(req, keep=False)
        elif problem := misfit(req, arrived, self._stages.builder.vocab_size, seated):
            logger.error("what a gate has brought for %s does not fit: %s", quoted(req.name), problem)
            text = f"what a gate has brought for this request does not fit: {problem}"
            self._requests.end(req, FinishReason(FinishType.ABORT, message=text, status=500, code="gate_failed"))
            return
        else:
            req.kv.committed_len = req.kv.scheduled_len = max(arrived.length, req.kv.cache_len)
            if arrived.token is not None:
                self._run(req, arrived, arrived.token, now)
                return
            memory.release(req)  # its KV is cached; the queue finds it there
        req.move_to(ReqStatus.WAITING)
        self._requests.ready(req)

    def _run(self, req: Req, arrived: Arrived, token: int, now: float) -> None:
        """Let a request run on whose prompt and first token were computed elsewhere."""
        stages, requests = self._stages, self._requests
        self._memory.cache_unfinished(req)
        req.move_to(ReqStatus.RUNNING)
        req.timing.ready = req.timing.first_scheduled = req.timing.last_token = now
        req.output.cached_tokens = arrived.cached_tokens
        batch = self._batch(req, now)
        if self._batch_scheduled:
            self._batch_scheduled(batch)
        finished, output = stages.results.accept(req, arrived, now)
        batch.tokens, batch.intervals, batch.committed_at = np.array([token]), np.array([np.nan]), now
        if output is not None:
            requests.outbox.append(output)
        if self._batch_committed:
            self._batch_committed(batch)
        grammars = stages.results.grammars
        if finished:
            requests.finished([req])
        elif req not in grammars.ahead and not grammars.sits_out(req):
            self._planner.ahead.append(req)
        requests.follow_grammars()
        stages.points.end_unsent()

    def _batch(self, req: Req, now: float) -> ScheduleBatch:
        length = np.array([req.input_len], np.int64)
        return ScheduleBatch(
            bid=self._stages.builder.next_number(),
            forward_mode=ForwardMode.PREBUILT,
            reqs=[req],
            seq_lens=length,
            extend_lens=np.zeros(1, np.int64),
            prefix_lens=length,
            planned_at=now,
        )

    def _tell(self, gates: GateKeeper, req: Req) -> None:
        length = req.input_len
        seat = Seat(self._memory.slots(req, 0, length).copy(), req.kv.cache_len, length)
        if (reason := gates.seated(req, seat)) is not None:
            self._requests.end(req, reason)

    def _adder(self) -> PrefillAdder:
        planner = self._planner
        return PrefillAdder(
            self._memory,
            planner.running,
            ratio=planner.ratio,
            max_prefill_tokens=1,
            chunk_size=None,
            decode_tokens=0,
            max_new_rows=self._memory.rows.free_rows,
            max_load_tokens=0,
            apart=(*planner.ahead, *planner.holding, *planner.seated),
        )
