"""A gate that every request passes, and that reads no parameter, passes the suite as it should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, Verdict
from pegboard.core.interfaces.req import Req
from pegboard.core.testing.admission_gate import AdmissionGateContract, gated_request
from pegboard.core.testing.mutants import Mutant, assert_caught


class RateLimit(AdmissionGate):
    """One request in half a second, whatever it says."""

    def __init__(self, options: Any, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._free = 0.0
        self._turn: dict[str, float] = {}

    def concerns(self, req: Req) -> bool:
        return True

    def enter(self, req: Req) -> Verdict:
        turn = max(self._free, self.ctx.clock())
        self._free = turn + 0.5
        self._turn[req.rid] = turn
        return self.poll([req])[req.rid]

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        now = self.ctx.clock()
        return {one.rid: OPEN if now >= self._turn[one.rid] else Verdict.blocked("its turn") for one in blocked}

    def cancel(self, req: Req) -> None:
        self._turn.pop(req.rid, None)

    def finished(self, req: Req) -> bool:
        self.cancel(req)
        return False


class TestRateLimit(AdmissionGateContract):
    factory = RateLimit
    params = ()

    def unconcerned_request(self) -> Req | None:
        return None

    def blocked_request(self, gate: AdmissionGate) -> Req:
        gate.enter(gated_request())
        return gated_request()


class ConcernsSome(RateLimit):
    def concerns(self, req: Req) -> bool:
        return bool(req.params)


def test_what_is_said_of_every_request_is_tested() -> None:
    caught_by = "test_a_request_that_asks_for_nothing_does_not_concern_it"
    assert_caught(Mutant(ConcernsSome, TestRateLimit, caught_by))
