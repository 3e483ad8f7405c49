"""How stages end requests: by reasons that are asked after each token, and by `StageContext.end`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage, StepResult, StepView
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.interfaces.stops import Ending
from pegboard.core.pipeline.gates import GateKeeper
from tests.core.pipeline.harness import IGNORE, Harness
from tests.core.pipeline.test_gates import ScriptedGate

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class AtTheThird:
    """Ends a request at its third token."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        return FinishReason(FinishType.STOP, matched=token) if req.output_len >= 3 else None


class Finishes(Stage):
    name = "test.finishes"

    def __init__(self, look: bool) -> None:
        self.look = look

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest(look=self.look)

    def finishers(self, req: Req) -> Iterable[Ending]:
        return [AtTheThird()]


@LOOPS
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_finishers_are_asked_after_each_token(loop: str, look: bool, stream: bool) -> None:
    harness = Harness(loop=loop, joining=[Finishes(look)])
    harness.submit("a", [1] * 9, 20, stream=stream, **IGNORE)
    harness.run()
    assert len(harness.tokens("a")) == 3
    assert harness.finish("a")["type"] == "stop"


class EndsInCommit(Stage):
    """Ends each request that has all its tokens, as a stage does whose own work for it has failed."""

    name = "test.ends"

    def __init__(self) -> None:
        self.end: Callable[[Req, FinishReason], None]

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest()

    def commit(self, step: StepView, result: StepResult) -> None:
        for req in step.sampled:
            if req.finished:
                self.end(req, FinishReason(FinishType.ABORT, message="its work has failed", status=500))


@LOOPS
def test_a_stage_ends_no_request_that_has_ended(loop: str) -> None:
    clock = ManualClock()
    gate = ScriptedGate("gate", [], clock, None)
    gate.holds = True
    stage = EndsInCommit()
    harness = Harness(loop=loop, joining=[stage], parts={"gates": GateKeeper([("gate", gate)], clock)})
    stage.end = harness.points.end
    harness.submit("a", [1] * 9, 3, **IGNORE)
    req = harness.scheduler.requests.alive["a"]
    for _ in range(6):
        harness.step()
    assert harness.finish("a")["type"] == "length"
    assert req.status is ReqStatus.HELD, "its KV was given up although a gate holds it"
    assert gate.log.count("gate.finished a") == 1
    assert "gate.drop a" not in gate.log
    gate.free = ["a"]
    harness.run()
