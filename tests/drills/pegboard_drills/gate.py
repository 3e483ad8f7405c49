"""A gate that misbehaves on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, Verdict

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard_drills.options import DrillGateOptions


class DrillGate(AdmissionGate):
    """Does to requests what they ask for in ``params["drill"]``, for instance ``{"act": "delay", "delay": 2}``.

    Not for production: whoever may send a request may have it held for as long as the gate's time-out.
    """

    def __init__(self, options: Any, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._since: dict[str, tuple[float, DrillGateOptions]] = {}
        """When each request that has not ended came, and what it asks for."""
        self._until: dict[str, float] = {}
        """Until when each held request is held."""

    def concerns(self, req: Req) -> bool:
        return "drill" in req.params or self.options.act != "open" or self.options.hold > 0

    def enter(self, req: Req) -> Verdict:
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

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return {req.rid: self._verdict(req.rid) for req in blocked}

    def cancel(self, req: Req) -> None:
        self._since.pop(req.rid, None)

    def finished(self, req: Req) -> bool:
        _, wants = self._since.pop(req.rid)
        if wants.hold > 0:
            self._until[req.rid] = self.ctx.clock() + wants.hold
        return wants.hold > 0

    def released(self) -> Iterable[str]:
        now = self.ctx.clock()
        free = [rid for rid, until in self._until.items() if now >= until]
        for rid in free:
            del self._until[rid]
        return free

    def drop(self, req: Req) -> None:
        self._until.pop(req.rid, None)

    def _verdict(self, rid: str) -> Verdict:
        since, wants = self._since[rid]
        if wants.act in ("open", "raise"):
            return OPEN
        waited = self.ctx.clock() - since
        if wants.act == "never":
            return Verdict.blocked("something that never happens")
        if waited < wants.delay:
            return Verdict.blocked(f"a delay of {wants.delay:g} s", waited / wants.delay)
        if wants.act == "fail":
            return Verdict.failed("failed, as asked", status=422, code="failed_as_asked", param="params.drill")
        return OPEN
