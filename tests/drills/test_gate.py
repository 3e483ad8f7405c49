"""The gate that misbehaves, and what the scheduler makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
from pegboard.core.interfaces.messages import AbortRequest, Accepted, Rejected
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.plugins.kv_handoff.api import HandoffGate
from pegboard.plugins.kv_handoff.suite.gate import HandoffGateContract
from pegboard_drills.gate import DrillGate
from pegboard_drills.options import DrillGateOptions
from tests.core.pipeline.harness import Harness, oracle


class TestDrillGate(HandoffGateContract):
    provider = "drill"

    def blocked_request(self, gate: AdmissionGate) -> Req:
        return gated_request({"drill": {"act": "delay", "delay": 0.5}})

    def held_request(self, gate: AdmissionGate) -> Req:
        return gated_request({"drill": {"hold": 0.5}})

    def reserving_request(self, gate: HandoffGate) -> Req:
        return gated_request({"drill": {"act": "bring", "token": 9, "linger": 0.5}})

    def followed_request(self, gate: HandoffGate) -> Req:
        return gated_request({"drill": {"hold": 0.5}})


class World:
    """A harness with two test gates in a row, and a clock that a test moves."""

    def __init__(self, loop: str = "normal", **options: Any) -> None:
        self.clock = ManualClock()
        ctx = AdmissionGateContext(self.clock)
        gates = [("first", DrillGate(DrillGateOptions(**options), ctx)), ("second", DrillGate(DrillGateOptions(), ctx))]
        self.keeper = GateKeeper(gates, self.clock)
        self.harness = Harness(loop=loop, parts={"gates": self.keeper, "clock": self.clock})

    def submit(self, rid: str, **drill: Any) -> Any:
        return self.harness.submit(rid, [1, 2, 3], 4, params={"drill": drill}, sampling={"ignore_eos": True})

    def status(self, rid: str) -> ReqStatus:
        return self.harness.scheduler.requests.alive[rid].status

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            self.harness.step()
            self.clock.advance(0.05)


LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


@LOOPS
def test_a_slow_gate_delays_its_request_only(loop: str) -> None:
    world = World(loop)
    assert isinstance(world.submit("slow", act="delay", delay=1.0), Accepted)
    world.harness.submit("plain", [4, 5], 4, sampling={"ignore_eos": True})
    world.run(0.8)
    assert world.harness.tokens("plain") == oracle([4, 5], 4, ignore_eos=True)
    assert world.status("slow") is ReqStatus.BLOCKED
    (waits,) = world.harness.scheduler.info()["gates"]
    assert (waits["rid"], waits["gate"], waits["reason"]) == ("slow", "first", "a delay of 1 s")
    assert 0.7 < waits["progress"] < 0.9
    assert world.harness.scheduler.resting
    # Both gates delay it, one after the other.
    world.run(2.0)
    world.harness.run()
    assert world.harness.tokens("slow") == oracle([1, 2, 3], 4, ignore_eos=True)
    assert not world.keeper


@LOOPS
def test_a_gate_that_fails_fails_its_request_only(loop: str) -> None:
    world = World(loop)
    world.submit("bad", act="fail", delay=0.2)
    world.submit("good")
    world.run(1.0)
    assert world.harness.finish("bad") == {
        "type": "abort",
        "message": "failed, as asked",
        "status": 422,
        "code": "failed_as_asked",
        "param": "params.drill",
    }
    assert world.harness.tokens("good") == oracle([1, 2, 3], 4, ignore_eos=True)
    world.harness.run()


def test_a_gate_that_fails_at_once_refuses() -> None:
    reply = World().submit("bad", act="fail", delay=0.0)
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.code) == (422, "failed_as_asked")


def test_a_gate_that_raises_refuses_with_its_name() -> None:
    world = World()
    reply = world.submit("bad", act="raise")
    assert isinstance(reply, Rejected)
    assert reply.status == 500
    assert "'first' failed: RuntimeError" in reply.message
    assert isinstance(world.submit("bad"), Accepted), "nothing is kept of it, its name is free"
    world.harness.run()


@LOOPS
def test_time_runs_out_at_a_gate_that_never_answers(loop: str) -> None:
    world = World(loop, timeout=2.0)
    world.submit("stuck", act="never")
    world.run(1.9)
    assert world.status("stuck") is ReqStatus.BLOCKED
    world.run(0.3)
    reason = world.harness.finish("stuck")
    assert reason["status"] == 504
    assert "gate 'first': something that never happens" in str(reason["message"])
    world.harness.run()
    assert world.harness.scheduler.idle


@LOOPS
def test_a_blocked_request_can_be_aborted(loop: str) -> None:
    world = World(loop)
    world.submit("a", act="never")
    world.submit("b", act="never")
    world.harness.scheduler.receive([AbortRequest(rid="a")])
    world.harness.step()
    assert world.harness.finish("a")["type"] == "abort"
    assert world.keeper.blocked == 1
    world.harness.scheduler.receive([AbortRequest(all_requests=True)])
    world.harness.run()
    assert not world.keeper


@LOOPS
def test_a_held_request_keeps_its_kv_until_it_is_released(loop: str) -> None:
    world = World(loop)
    world.submit("a", hold=1.0)
    world.run(0.8)
    assert world.harness.tokens("a") == oracle([1, 2, 3], 4, ignore_eos=True), "the answer does not wait"
    assert world.status("a") is ReqStatus.HELD
    assert world.harness.memory.held_tokens + world.harness.memory.cache.locked_tokens > 0
    assert not world.harness.scheduler.idle
    world.run(1.0)
    world.harness.run()
    assert world.harness.memory.cache.locked_tokens == 0


@LOOPS
def test_a_held_request_can_be_dropped(loop: str) -> None:
    world = World(loop)
    world.submit("a", hold=1000.0)
    world.run(0.8)
    assert world.status("a") is ReqStatus.HELD
    world.harness.scheduler.receive([AbortRequest(all_requests=True)])
    world.harness.run()
    assert len(world.harness.outputs["a"]) == 1, "it was answered already"


def test_an_aborted_request_is_not_held() -> None:
    world = World()
    world.submit("a", hold=1000.0)
    world.harness.step()
    world.harness.scheduler.receive([AbortRequest(rid="a")])
    world.harness.run()
    assert not world.keeper


def test_a_retracted_request_does_not_pass_the_gates_again() -> None:
    world = World(act="delay", delay=0.2)
    world.submit("a", act="delay", delay=0.2)
    world.run(0.6)
    (req,) = world.harness.scheduler.running
    world.harness.scheduler.planner.retract(req)
    world.harness.run()
    assert world.harness.tokens("a") == oracle([1, 2, 3], 4, ignore_eos=True)


class Erratic(DrillGate):
    """Raises where it is told to."""

    fails_in = ""

    def poll(self, blocked: Any) -> Any:
        if self.fails_in == "poll":
            raise RuntimeError("poll")
        return super().poll(blocked)

    def finished(self, req: Req) -> bool:
        if self.fails_in == "finished":
            raise RuntimeError("finished")
        return super().finished(req)

    def released(self) -> Any:
        if self.fails_in == "released":
            raise RuntimeError("released")
        return super().released()


@pytest.mark.parametrize("where", ["poll", "finished", "released"])
def test_whatever_a_gate_raises_nothing_hangs(where: str) -> None:
    clock = ManualClock()
    gate = Erratic(DrillGateOptions(), AdmissionGateContext(clock))
    gate.fails_in = where
    keeper = GateKeeper([("erratic", gate)], clock)
    harness = Harness(parts={"gates": keeper, "clock": clock})
    harness.submit("plain", [7, 8], 4, sampling={"ignore_eos": True})
    harness.submit(
        "a", [1, 2], 4, params={"drill": {"act": "delay", "delay": 0.2, "hold": 0.3}}, sampling={"ignore_eos": True}
    )
    for _ in range(100):
        harness.step()
        clock.advance(0.05)
    harness.run()
    assert harness.tokens("plain") == oracle([7, 8], 4, ignore_eos=True)
    assert (harness.finish("a")["type"] == "abort") == (where == "poll")
    assert sum(keeper.failures_by.values()) > 0


@pytest.mark.parametrize("said", [{"act": "dance"}, {"unknown": 1}, {"delay": -1}, "now"])
def test_what_it_does_not_understand_is_refused(said: Any) -> None:
    gate = DrillGate(DrillGateOptions(), AdmissionGateContext())
    verdict = gate.enter(gated_request({"drill": said}))
    assert (verdict.status, verdict.param) == (400, "params.drill")
