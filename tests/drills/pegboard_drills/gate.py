"""A gate that misbehaves on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.step import TokenValues
from pegboard.plugins.kv_handoff.api import Arrived, HandoffGate, KVReservation, KVVerdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard_drills.options import DrillGateOptions


class DrillGate(HandoffGate):
    """Does to requests what they ask for in ``params["drill"]``, for instance ``{"act": "delay", "delay": 2}``.

    Not for production: whoever may send a request may have it held for as long as the gate's time-out.
    """

    def __init__(self, options: Any, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._since: dict[str, tuple[float, DrillGateOptions]] = {}
        """When each request that has not ended came, and what it asks for."""
        self._until: dict[str, float] = {}
        """Until when each held request is held, and the memory of each cancelled one written to."""
        self._reservations: dict[str, tuple[float, KVReservation]] = {}
        """Reserved memory, since when."""
        self._brought = 0
        self.places: dict[str, NDArray[np.int32]] = {}
        """Where the KV of each request lies that has passed, as it was told."""
        self.write: Callable[[str, KVReservation, bool], None] | None = None
        """Writes to reserved memory, when it is there and when the KV arrives, and as long as it is still written to
        after it was given back; the last value says whether it is wanted.
        """

    def concerns(self, req: Req) -> bool:
        return "drill" in req.params or self.options.act != "open" or self.options.hold > 0

    def judge(self, req: Req) -> Verdict:
        asked = req.params.get("drill") or {}
        try:
            wants = type(self.options).model_validate({**self.options.model_dump(), **asked})
        except (ValidationError, TypeError) as error:
            text = f"params.drill is not what the drill gate understands: {error}"
            return Verdict.failed(text, code="invalid_drill", param="params.drill")
        self._since[req.rid] = (self.ctx.clock(), wants)
        if wants.act == "raise":
            raise RuntimeError("the drill gate raises, as asked")
        return self._verdict(req.rid)

    def news(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return {req.rid: self._verdict(req.rid) for req in blocked}

    def reserved(self, req: Req, reservation: KVReservation) -> None:
        self._reservations[req.rid] = (self.ctx.clock(), reservation)
        self._write(req.rid, True)

    def follows(self, req: Req) -> bool:
        return self.concerns(req)

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        self.places[req.rid] = slots

    def forget(self, req: Req) -> bool:
        _, wants = self._since.pop(req.rid, (0.0, None))
        if wants is None or not wants.linger or req.rid not in self._reservations:
            self._reservations.pop(req.rid, None)
            return False
        self._until[req.rid] = self.ctx.clock() + wants.linger
        return True

    def finished(self, req: Req) -> bool:
        _, wants = self._since.pop(req.rid)
        if not wants.hold:
            self.places.pop(req.rid, None)
        if wants.hold > 0:
            self._until[req.rid] = self.ctx.clock() + wants.hold
        return wants.hold > 0

    def released(self) -> Iterable[str]:
        now = self.ctx.clock()
        for rid in self._until.keys() & self._reservations.keys():
            self._write(rid, False)
        free = [rid for rid, until in self._until.items() if now >= until]
        for rid in free:
            del self._until[rid]
            self._reservations.pop(rid, None)
            self.places.pop(rid, None)
        return free

    def drop(self, req: Req) -> None:
        self._until.pop(req.rid, None)
        self.places.pop(req.rid, None)

    def stats(self) -> Mapping[str, float]:
        return {"brought_total": self._brought, "reservations": len(self._reservations)}

    def _write(self, rid: str, wanted: bool) -> None:
        if self.write is not None:
            self.write(rid, self._reservations[rid][1], wanted)

    def _bring(self, rid: str, wants: DrillGateOptions) -> Verdict:
        since, memory = self._reservations.get(rid, (0.0, None))
        if memory is None:
            return KVVerdict.asking("memory")
        waited = self.ctx.clock() - since
        if waited < wants.delay:
            return KVVerdict.asking(f"KV, for {wants.delay:g} s", waited / wants.delay)
        self._write(rid, True)
        del self._reservations[rid]
        self._brought += 1
        length = memory.length if wants.length is None else wants.length
        values = TokenValues(logprob=-0.5, tops=((-0.5, 3),), chosen=((-0.5, 3),), cached_tokens=2)
        return KVVerdict(GateState.OPEN, arrived=Arrived(length, wants.token, values), max_new_tokens=wants.most)

    def _verdict(self, rid: str) -> Verdict:
        since, wants = self._since[rid]
        if wants.act == "bring":
            return self._bring(rid, wants)
        if wants.act in ("open", "raise"):
            return replace(OPEN, max_new_tokens=wants.most)
        waited = self.ctx.clock() - since
        if wants.act == "never":
            return Verdict.blocked("something that never happens")
        if waited < wants.delay:
            return Verdict.blocked(f"a delay of {wants.delay:g} s", waited / wants.delay)
        if wants.act == "fail":
            return Verdict.failed("failed, as asked", status=422, code="failed_as_asked", param="params.drill")
        return OPEN
