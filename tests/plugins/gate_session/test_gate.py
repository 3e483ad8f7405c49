"""Turns of a session run one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pegboard.conformance.admission_gate import AdmissionGateContract, ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState
from pegboard.core.interfaces.messages import AbortRequest, Accepted, Rejected
from pegboard.core.interfaces.req import Req
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.plugins.gate_session.gate import SessionGate
from pegboard.plugins.gate_session.options import SessionGateOptions
from tests.core.pipeline.harness import Harness, oracle

SESSIONS = itertools.count()


class TestSessionGate(AdmissionGateContract):
    provider = "session"

    def blocked_request(self, gate: AdmissionGate) -> Req:
        session = f"s{next(SESSIONS)}"
        first = gated_request({"session": {"id": session}})
        assert gate.enter(first).state is GateState.OPEN
        self.first = first
        return gated_request({"session": {"id": session}})

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        gate.finished(self.first)


def make_gate(**options: Any) -> SessionGate:
    return SessionGate(SessionGateOptions(**options), AdmissionGateContext(ManualClock()))


@pytest.mark.parametrize("said", [{}, {"id": 3}, {"id": ""}, {"id": "x" * 257}, "s1", None, {"id": None}])
def test_what_is_no_session_is_refused(said: Any) -> None:
    verdict = make_gate().enter(gated_request({"session": said}))
    assert (verdict.state, verdict.status, verdict.param) == (GateState.FAILED, 400, "params.session")


def test_too_many_waiting_turns() -> None:
    gate = make_gate(max_waiting_turns=2)
    verdicts = [gate.enter(gated_request({"session": {"id": "s"}})) for _ in range(4)]
    assert [one.state.value for one in verdicts] == ["open", "blocked", "blocked", "failed"]
    assert verdicts[-1].status == 429
    assert gate.enter(gated_request({"session": {"id": "other"}})).state is GateState.OPEN


def with_sessions(**more: Any) -> Harness:
    keeper = GateKeeper([("session", make_gate())], ManualClock())
    return Harness(parts={"gates": keeper}, **more)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_turns_of_a_session_never_run_together(loop: str) -> None:
    harness = with_sessions(loop=loop)
    ended: list[str] = []
    for turn in range(4):
        for session in "ab":
            reply = harness.submit(
                f"{session}{turn}", [turn, 5, 6], 6, params={"session": {"id": session}}, sampling={"ignore_eos": True}
            )
            assert isinstance(reply, Accepted)
    while not harness.scheduler.idle:
        together = [req.rid[0] for req in harness.scheduler.running]
        assert len(together) == len(set(together)), f"two turns of one session run: {together}"
        ended += [output.rid for output in harness.step() if output.finish_reason]
    for session in "ab":
        assert [rid for rid in ended if rid[0] == session] == [f"{session}{turn}" for turn in range(4)]
        assert all(harness.tokens(f"{session}{t}") == oracle([t, 5, 6], 6, ignore_eos=True) for t in range(4))


@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
def test_an_aborted_turn_lets_the_next_one_through(victim: str) -> None:
    harness = with_sessions()
    for turn in range(3):
        harness.submit(f"a{turn}", [turn, 5], 5, params={"session": {"id": "a"}}, sampling={"ignore_eos": True})
    harness.step()
    harness.scheduler.receive([AbortRequest(rid=victim)])
    harness.run()
    assert harness.finish(victim)["type"] == "abort"
    for turn in range(3):
        if f"a{turn}" != victim:
            assert harness.tokens(f"a{turn}") == oracle([turn, 5], 5, ignore_eos=True)


def test_a_refusal_reaches_the_client_before_anything_runs() -> None:
    reply = with_sessions().submit("a", [1], 3, params={"session": {"id": 7}})
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.code, reply.param) == (400, "invalid_session", "params.session")
