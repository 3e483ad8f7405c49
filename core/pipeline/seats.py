"""Seats: blocked requests that have a place in memory already, for KV that a gate brings, and how they join."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import Seat
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.pipeline.admission import PrefillAdder
from pegboard.core.pipeline.verdicts import misfit
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.core.interfaces.admission_gate import Arrived
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import Launched
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.stages import Stages

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
        begin: Callable[[Req, int, int], None],
    ) -> None:
        self._planner = planner
        self._memory = stages.memory
        self._stages = stages
        self._requests = requests
        self._begin = begin
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
        memory = self._memory
        seated = req.kv.row != NO_ROW
        self._planner.seated.discard(req)
        if arrived is None:
            memory.release(req, keep=False)
        elif problem := misfit(req, arrived, self._stages.builder.vocab_size, seated):
            logger.error("what a gate has brought for %s does not fit: %s", quoted(req.name), problem)
            text = f"what a gate has brought for this request does not fit: {problem}"
            self._requests.end(req, FinishReason(FinishType.ABORT, message=text, status=500, code="gate_failed"))
            return
        elif arrived.token is not None:
            _note(req, arrived)
            self._stages.points.adopt(req, arrived.rows)
            self._begin(req, arrived.length, arrived.token)
            return
        else:
            req.kv.committed_len = req.kv.scheduled_len = max(arrived.length, req.kv.cache_len)
            memory.release(req)  # its KV is cached; the queue finds it there
        req.move_to(ReqStatus.WAITING)
        self._requests.ready(req)

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
            apart=(*planner.holding, *planner.seated),
        )


def _note(req: Req, arrived: Arrived) -> None:
    """Give a request what it wants of its first token, beside that token."""
    req.output.cached_tokens = arrived.cached_tokens
    kept = req.logprobs
    if kept is not None and arrived.logprob is not None:
        kept.values.append(arrived.logprob)
        kept.tops.append(list(arrived.tops))
        if kept.token_ids:
            kept.chosen.append(list(arrived.chosen))
