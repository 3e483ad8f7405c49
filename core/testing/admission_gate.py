"""The conformance suite of AdmissionGate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.testing.suite import ContractSuite, capability, lacks

_NAMES = itertools.count()
PATIENCE = 200
"""How often a gate is polled, a hundredth of a second apart, before it counts as one that never opens."""


NONSENSE: tuple[Any, ...] = (None, True, 7, -1.5, "", "nonsense", [], ["nonsense", 3], {}, {"nonsense": {"x": []}})
"""What a request may say to a gate: any plain value at all."""


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def gated_request(
    params: Mapping[str, Any] | None = None, *, rid: str = "", sampling: SamplingParams | None = None
) -> Req:
    """A waiting request with parameters for gates. Its rid is like no other's, so that traces of it can be found."""
    name = rid or f"gated-{next(_NAMES)}-request"
    return Req(name, np.arange(1, 6, dtype=np.int64), sampling or SamplingParams(max_new_tokens=4), params=params)


class AdmissionGateContract(ContractSuite):
    """A gate says clearly who waits and why, opens when it should, and forgets everybody who is gone.

    The suite cannot know what a gate waits for: a subclass says how a request gets blocked, and how the way is cleared.
    """

    contract = "admission_gate"

    param: ClassVar[str] = ""
    """Where in a request's `params` the gate looks: by default under the provider's name."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def gate(self, clock: ManualClock) -> AdmissionGate:
        built: AdmissionGate = self.build(AdmissionGateContext(clock))
        return built

    def blocked_request(self, gate: AdmissionGate) -> Req:
        """A new request that the gate blocks when it enters. Override this."""
        pytest.skip("override blocked_request: the suite cannot know what this gate waits for")

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        """Whatever `req` waits for happens now. Override this where the clock alone does not bring it about."""

    def held_request(self, gate: AdmissionGate) -> Req:
        """A new request that passes when it enters and that the gate holds after its end (capability `holds`)."""
        pytest.skip("override held_request: the suite cannot know what this gate holds")

    def let_go(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        """What `req` is held for is over. Override this where the clock alone does not bring it about."""

    # What the tests share.

    def blocked(self, gate: AdmissionGate) -> tuple[Req, Verdict]:
        req = self.blocked_request(gate)
        assert gate.concerns(req), "a gate that blocks a request says that it concerns it"
        verdict = gate.enter(req)
        assert verdict.state is GateState.BLOCKED
        return req, verdict

    def wait_until_open(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        for _ in range(PATIENCE):
            verdict = gate.poll([req]).get(req.rid)
            if verdict is not None and verdict.state is GateState.OPEN:
                return
            assert verdict is None or verdict.state is GateState.BLOCKED, f"the way was clear, yet: {verdict}"
            clock.advance(0.01)
        pytest.fail(f"not open after {PATIENCE} polls")

    def assert_forgotten(self, gate: AdmissionGate, req: Req) -> None:
        __tracebackhide__ = True
        traces = [
            name for name, value in vars(gate).items() if name not in ("options", "ctx") and req.rid in repr(value)
        ]
        assert not traces, f"the request is gone, but the gate keeps it in {', '.join(traces)}"

    # The tests.

    def test_a_request_that_asks_for_nothing_does_not_concern_it(self, gate: AdmissionGate) -> None:
        req = gated_request()
        assert gate.concerns(req) is False
        self.assert_forgotten(gate, req)

    def test_nonsense_is_taken_or_refused(self, gate: AdmissionGate) -> None:
        for said in NONSENSE:
            req = gated_request({self.param or self.subject.name: said})
            if not gate.concerns(req):
                continue
            verdict = gate.enter(req)
            if verdict.state is GateState.FAILED:
                assert 400 <= verdict.status <= 499, f"{said!r} is the client's mistake, not the server's"
                assert verdict.reason.strip(), "people read the reason"
            gate.cancel(req)
            self.assert_forgotten(gate, req)

    def test_a_blocked_request_is_told_why(self, gate: AdmissionGate) -> None:
        _, verdict = self.blocked(gate)
        assert verdict.reason.strip(), "people read the reason"
        assert verdict.progress is None or 0.0 <= verdict.progress <= 1.0

    def test_blocked_until_the_way_is_clear(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        for _ in range(3):
            verdict = gate.poll([req]).get(req.rid)
            assert verdict is None or verdict.state is GateState.BLOCKED
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)

    def test_news_is_of_those_asked_about(self, gate: AdmissionGate, clock: ManualClock) -> None:
        first, _ = self.blocked(gate)
        second, _ = self.blocked(gate)
        self.clear(gate, clock, first)
        for _ in range(3):
            assert set(gate.poll([second])) <= {second.rid}
            clock.advance(0.01)

    def test_a_cancelled_request_is_forgotten(self, gate: AdmissionGate) -> None:
        req, _ = self.blocked(gate)
        gate.cancel(req)
        self.assert_forgotten(gate, req)
        gate.cancel(req)
        assert not gate.poll([])

    def test_a_cancelled_request_leaves_others_alone(self, gate: AdmissionGate, clock: ManualClock) -> None:
        first, _ = self.blocked(gate)
        second, _ = self.blocked(gate)
        gate.cancel(first)
        self.clear(gate, clock, second)
        self.wait_until_open(gate, clock, second)

    def test_a_name_may_come_again(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        gate.cancel(req)
        again = gated_request(req.params, rid=req.rid, sampling=req.sampling)
        assert gate.concerns(again)
        assert gate.enter(again).state is not GateState.FAILED
        gate.cancel(again)
        self.assert_forgotten(gate, again)

    def test_requests_are_read_and_not_changed(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req = self.blocked_request(gate)
        before = _state(req)
        gate.concerns(req)
        gate.enter(req)
        gate.poll([req])
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        gate.finished(req)
        assert _state(req) == before, "only the pipeline changes a request"

    def test_a_finished_request_is_forgotten(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        if gate.finished(req):
            gate.drop(req)
        self.assert_forgotten(gate, req)

    @capability("holds")
    def test_a_held_request_is_released_once(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req = self.held_request(gate)
        assert gate.concerns(req)
        assert gate.enter(req).state is GateState.OPEN
        assert gate.finished(req) is True
        assert req.rid not in gate.released()
        self.let_go(gate, clock, req)
        named = []
        for _ in range(PATIENCE):
            named += [rid for rid in gate.released() if rid == req.rid]
            clock.advance(0.01)
        assert named == [req.rid]
        self.assert_forgotten(gate, req)

    @capability("holds")
    def test_a_held_request_that_is_dropped_is_forgotten(self, gate: AdmissionGate) -> None:
        req = self.held_request(gate)
        gate.enter(req)
        assert gate.finished(req) is True
        gate.drop(req)
        self.assert_forgotten(gate, req)
        assert req.rid not in gate.released()

    @lacks("holds")
    def test_nobody_is_held(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        assert gate.finished(req) is False
        assert not list(gate.released())


def _state(req: Req) -> tuple[Any, ...]:
    """What a gate must leave as it is: everything but the slots."""
    return (req.rid, req.status, req.priority, req.flags, tuple(req.tokens.view()), req.blocked_by, dict(req.params))
