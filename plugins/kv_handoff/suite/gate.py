"""The conformance suite of gates that bring KV or take it elsewhere, beyond that of all gates."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.admission_gate import PATIENCE, AdmissionGateContract, ManualClock, gated_request
from pegboard.conformance.admission_gate.rig import assert_unchanged, let_threads_work, state_of
from pegboard.conformance.rig.blocking import no_waiting
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.admission_gate import GateState, Verdict
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.req import Req
from pegboard.plugins.kv_handoff.api import HandoffGate, KVReservation, KVVerdict


def asks(verdict: Verdict | None) -> bool:
    """Return whether a verdict asks for memory."""
    return isinstance(verdict, KVVerdict) and verdict.reserve


class HandoffGateContract(AdmissionGateContract):
    """A gate asks for memory before it brings KV, brings what fits, and says when nothing is written any more.

    The suite stands for the core: it calls `reserved` where a verdict asks for it, and `computed` of what is followed.
    """

    contract = "admission_gate"

    def reserving_request(self, gate: HandoffGate) -> Req:
        """Return a new request for which the gate asks for memory, now or soon (capability `brings_kv`)."""
        pytest.skip("override reserving_request: the suite cannot know what this gate brings KV for")

    def bring(self, gate: HandoffGate, clock: ManualClock, req: Req) -> None:
        """Let the KV of a request arrive that has memory. Override this where the clock alone does not bring it
        about.
        """

    def stop_writing(self, gate: HandoffGate, clock: ManualClock, req: Req) -> None:
        """Let the writing end to the memory of a request that was cancelled. Override this where the clock alone does
        not bring it about.
        """

    def followed_request(self, gate: HandoffGate) -> Req:
        """Return a new request that passes when it enters, and that the gate follows."""
        pytest.skip("override followed_request, if the gate follows any request")

    # What the tests share.

    def reserve(self, gate: HandoffGate, clock: ManualClock) -> Req:
        """Return a request that has just got memory."""
        req = self.reserving_request(gate)
        verdict = self.enter(gate, req)
        for turn in range(PATIENCE):
            assert verdict.state is GateState.BLOCKED, f"only a blocked request gets memory, and this one is: {verdict}"
            if asks(verdict):
                break
            clock.advance(0.01)
            let_threads_work(turn)
            verdict = self.poll(gate, req).get(req.rid, verdict)
        assert asks(verdict), f"no memory was asked for in {PATIENCE} polls"
        slots = np.arange(16, 16 + req.input_len, dtype=np.int32)
        gate.reserved(req, KVReservation(slots, 2, req.input_len))
        return req

    @capability("brings_kv")
    def test_what_was_brought_arrives(self, gate: HandoffGate, clock: ManualClock) -> None:
        """With a token it is the whole prompt's KV, and never more than that."""
        req = self.reserve(gate, clock)
        self.bring(gate, clock, req)
        for turn in range(PATIENCE):
            verdict = self.poll(gate, req).get(req.rid)
            if verdict is not None and verdict.state is GateState.OPEN:
                break
            assert verdict is None or verdict.state is GateState.BLOCKED, f"its KV has arrived, yet: {verdict}"
            clock.advance(0.01)
            let_threads_work(turn)
        assert verdict is not None, f"not open after {PATIENCE} polls"
        assert isinstance(verdict, KVVerdict), "it opens without what it brought"
        assert verdict.arrived is not None, "it opens without what it brought"
        length, size = verdict.arrived.length, req.input_len
        assert 0 <= length <= size, f"KV of {length} tokens has arrived for a prompt of {size}"
        assert verdict.arrived.token is None or length == size, (
            f"a token has arrived with KV of {length} tokens: with a token it is that of the whole prompt, {size}"
        )
        gate.passed(req)
        if gate.finished(req):
            gate.drop(req)
        self.assert_forgotten(gate, req)

    @capability("brings_kv")
    def test_memory_that_is_given_back_is_forgotten(self, gate: HandoffGate, clock: ManualClock) -> None:
        """At once, or when it is written to no more; until then `released` does not name it."""
        req = self.reserve(gate, clock)
        still = gate.cancel(req)
        assert still in (True, False, None), f"cancel answers {still!r}"
        if still:
            assert req.rid not in gate.released(), "released() names a request whose memory is still written to"
            self.stop_writing(gate, clock, req)
            end = "when its memory is written to no more. After stop_writing() of the test class it is not"
            self.wait_for_release(gate, clock, req, end)
        self.assert_forgotten(gate, req)
        assert req.rid not in gate.released(), "released() names a request twice"

    @capability("brings_kv")
    def test_a_request_may_end_before_it_has_memory(self, gate: HandoffGate) -> None:
        req = self.reserving_request(gate)
        gate.concerns(req)
        gate.enter(req)
        assert not gate.cancel(req), "there is no memory that could be written to"
        self.assert_forgotten(gate, req)

    @lacks("brings_kv")
    def test_no_memory_is_asked_for(self, gate: HandoffGate) -> None:
        req, verdict = self.blocked(gate)
        assert not asks(verdict), "a verdict asks for memory: declare the capability `brings_kv` in the record"
        with pytest.raises(Unsupported):
            gate.reserved(req, KVReservation(np.arange(5, dtype=np.int32), 0, 5))
        still = gate.cancel(req)
        assert not still, f"cancel() answers {still!r}, which says that memory is written to, and none was asked for"

    def test_what_is_computed_is_followed(self, gate: HandoffGate) -> None:
        """In chunks, after memory was taken from it and it is computed elsewhere, and to its end."""
        req = self.followed_request(gate)
        assert gate.follows(req) is True, "follows() does not answer True for a request of followed_request()"
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

    def test_what_does_not_concern_it_is_not_followed(self, gate: HandoffGate) -> None:
        """It is asked before gates are, and of nonsense as well; what it follows it has to know."""
        req = self.unconcerned_request()
        assert req is None or not gate.follows(req), "follows() is true for a request that does not concern the gate"
        for what, req in self.nonsense():
            follows = gate.follows(req)
            assert not follows or gate.concerns(req), f"it follows a request that does not concern it: {what}"
            self.assert_forgotten(gate, req)

    def test_a_gate_that_follows_nothing_is_told_nothing(self, gate: HandoffGate) -> None:
        if type(gate).follows is HandoffGate.follows:
            with pytest.raises(Unsupported):
                gate.computed(gated_request(), np.arange(2, dtype=np.int32))
