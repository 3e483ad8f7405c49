"""The part of AdmissionGate's conformance suite about seats, and about following what is computed."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.blocking import no_waiting
from pegboard.conformance.gate_rig import (
    PATIENCE,
    GateRig,
    ManualClock,
    assert_unchanged,
    gated_request,
    let_threads_work,
    state_of,
)
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Seat
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.req import Req


class SeatTests(GateRig):
    """Gates that bring KV, and gates that follow it."""

    def seat(self, gate: AdmissionGate, clock: ManualClock) -> Req:
        """Return a request that has just been seated."""
        req = self.seated_request(gate)
        verdict = self.enter(gate, req)
        for turn in range(PATIENCE):
            assert verdict.state is GateState.BLOCKED, f"only a blocked request is seated, and this one is: {verdict}"
            assert verdict.arrived is None, "a verdict has `arrived` before the request was seated"
            if verdict.seat:
                break
            clock.advance(0.01)
            let_threads_work(turn)
            verdict = gate.poll([req]).get(req.rid, verdict)
        assert verdict.seat, f"no seat was asked for in {PATIENCE} polls"
        gate.seated(req, Seat(np.arange(16, 16 + req.input_len, dtype=np.int32), 2, req.input_len))
        return req

    def wait_for_release(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        named = []
        for turn in range(PATIENCE):
            named += [rid for rid in gate.released() if rid == req.rid]
            clock.advance(0.01)
            if not named:
                let_threads_work(turn)
        assert named == [req.rid], (
            f"in {PATIENCE} calls released() has named a seat {len(named)} times: once, when it is written to no more. "
            "After stop_writing() of the test class it is not"
        )

    @capability("seats")
    def test_what_was_brought_arrives(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """With a token it is the whole prompt's KV, and never more than that."""
        req = self.seat(gate, clock)
        self.bring(gate, clock, req)
        for turn in range(PATIENCE):
            verdict = self.poll(gate, req).get(req.rid)
            if verdict is not None and verdict.state is GateState.OPEN:
                break
            assert verdict is None or verdict.state is GateState.BLOCKED, f"its KV has arrived, yet: {verdict}"
            clock.advance(0.01)
            let_threads_work(turn)
        assert verdict is not None, f"not open after {PATIENCE} polls"
        assert verdict.arrived is not None, "it opens without what it brought"
        length, size = verdict.arrived.length, req.input_len
        assert 0 <= length <= size, f"KV of {length} tokens has arrived for a prompt of {size}"
        assert verdict.arrived.token is None or length == size, (
            f"a token has arrived with KV of {length} tokens: with a token it is that of the whole prompt, {size}"
        )
        if gate.finished(req):
            gate.drop(req)
        self.assert_forgotten(gate, req)

    @capability("seats")
    def test_a_seat_that_is_given_back_is_forgotten(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """At once, or when it is written to no more; until then `released` does not name it."""
        req = self.seat(gate, clock)
        still = gate.cancel(req)
        assert still in (True, False, None), f"cancel answers {still!r}"
        if still:
            assert req.rid not in gate.released(), "released() names a seat that is still written to"
            self.stop_writing(gate, clock, req)
            self.wait_for_release(gate, clock, req)
        self.assert_forgotten(gate, req)
        assert req.rid not in gate.released(), "released() names a seat twice"

    @capability("seats")
    def test_a_request_may_end_before_it_is_seated(self, gate: AdmissionGate) -> None:
        req = self.seated_request(gate)
        gate.concerns(req)
        gate.enter(req)
        assert not gate.cancel(req), "there is no seat that could be written to"
        self.assert_forgotten(gate, req)

    @lacks("seats")
    def test_no_seat_is_asked_for(self, gate: AdmissionGate) -> None:
        req, verdict = self.blocked(gate)
        assert not verdict.seat, "a verdict asks for a seat: declare the capability `seats` in the record"
        with pytest.raises(Unsupported):
            gate.seated(req, Seat(np.arange(5, dtype=np.int32), 0, 5))
        still = gate.cancel(req)
        assert not still, f"cancel() answers {still!r}, which says that a seat is written to, and there are no seats"

    @capability("follows")
    def test_what_is_computed_is_followed(self, gate: AdmissionGate) -> None:
        """In chunks, after memory was taken from it and it is computed elsewhere, and to its end."""
        req = self.followed_request(gate)
        verdict = self.enter(gate, req)
        assert verdict.state is GateState.OPEN, f"enter() answers {verdict} to a request of followed_request()"
        before = state_of(req)
        for slots in ([7, 8], [7, 8, 9], [], [4, 5], [4, 5, 6, 9, 8]):
            with no_waiting("computed"):
                gate.computed(req, np.array(slots, np.int32))
        assert_unchanged(req, before)
        if gate.finished(req):
            gate.drop(req)
        self.assert_forgotten(gate, req)

    @lacks("follows")
    def test_nothing_is_followed(self, gate: AdmissionGate) -> None:
        with pytest.raises(Unsupported):
            gate.computed(gated_request(), np.arange(2, dtype=np.int32))
