"""The conformance suite of AdmissionGate."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Mapping

import pytest

from pegboard.conformance.admission_gate.rig import (
    NONSENSE,
    PATIENCE,
    GateRig,
    ManualClock,
    assert_unchanged,
    gated_request,
    let_threads_work,
    state_of,
)
from pegboard.conformance.admission_gate.saying import SayingTests
from pegboard.conformance.rig.blocking import no_waiting
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Verdict
from pegboard.core.interfaces.req import Req

__all__ = ["PATIENCE", "AdmissionGateContract", "GateRig", "ManualClock", "gated_request"]


class AdmissionGateContract(SayingTests):
    """A gate says clearly which requests wait and why, opens when it should, and forgets those that are gone.

    The suite cannot know what a gate waits for: a subclass says how a request gets blocked, and how the way is cleared.
    """

    contract = "admission_gate"

    def test_a_request_that_asks_for_nothing_does_not_concern_it(self, gate: AdmissionGate) -> None:
        req = self.unconcerned_request()
        if req is None:
            assert gate.concerns(gated_request()) is True, "unconcerned_request says that every request concerns it"
            return
        concerned = gate.concerns(req)
        assert concerned is False, (
            f"concerns() answers {concerned!r} for a request with params={dict(req.params)}. If every request "
            "concerns this gate, let unconcerned_request return None in the test class"
        )
        self.assert_forgotten(gate, req)

    def test_nonsense_is_taken_or_refused(self, gate: AdmissionGate) -> None:
        tried = [self.try_nonsense(gate, what, req) for what, req in self.nonsense()]
        assert any(tried) or not self.names(), (
            f"no value under params {list(self.names())} concerned the gate, so nothing was tried. If it looks "
            'elsewhere, say so in the test class: params = ("name",), or () where it reads none'
        )

    def test_nonsense_in_a_field_is_taken_or_refused(self, gate: AdmissionGate) -> None:
        """What blocks a request, with something else in place of each thing that it says."""
        params = self.blocked_request(gate).params
        tried = 0
        for name, said in params.items():
            fields = said if isinstance(said, Mapping) else {}
            for field, wrong in itertools.product(fields, (*NONSENSE, math.nan, math.inf, -(10**30))):
                req = gated_request({**params, name: {**fields, field: wrong}})
                tried += self.try_nonsense(gate, f"params[{name!r}][{field!r}] = {wrong!r}", req)
        if not tried:
            pytest.skip("its parameters have no fields")

    def test_coming_in_never_blocks(self, gate: AdmissionGate) -> None:
        """Whatever a request says: `concerns`, `enter` and `cancel` return at once."""
        for what, req in [("nothing", gated_request()), *self.nonsense()]:
            with no_waiting(f"concerns (of a request that says {what})"):
                concerned = gate.concerns(req)
            if concerned:
                with no_waiting(f"enter (of a request that says {what})"):
                    gate.enter(req)
                with no_waiting("cancel"):
                    gate.cancel(req)

    def test_waiting_never_blocks(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """`poll` looks how far the work is, and does not wait for it. So do the others, when a request does wait."""
        other, req = self.blocked_request(gate), self.blocked_request(gate)
        with no_waiting("enter"):
            gate.enter(other)
            gate.enter(req)
        with no_waiting("poll"):
            gate.poll([req, other])
        with no_waiting("cancel"):
            gate.cancel(other)
        self.clear(gate, clock, req)
        with no_waiting("poll"):
            verdict = gate.poll([req]).get(req.rid)
        # A gate may say so once.
        if isinstance(verdict, Verdict) and verdict.state is GateState.OPEN:
            with no_waiting("passed"):
                gate.passed(req)
        else:
            self.wait_until_open(gate, clock, req)
        with no_waiting("finished"):
            held = gate.finished(req)
        with no_waiting("released"):
            list(gate.released())
        if held:
            with no_waiting("drop"):
                gate.drop(req)

    def test_a_blocked_request_is_told_why(self, gate: AdmissionGate) -> None:
        _, verdict = self.blocked(gate)
        assert verdict.reason.strip(), "people read the reason"
        progress = verdict.progress
        assert progress is None or 0.0 <= progress <= 1.0, f"progress is {progress}: it is a share, from 0 to 1"

    def test_blocked_until_the_way_is_clear(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        for _ in range(3):
            verdict = self.poll(gate, req).get(req.rid)
            assert verdict is None or verdict.state is GateState.BLOCKED, (
                f"poll() says {verdict} of a request, before what it waits for has happened"
            )
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)

    def test_news_is_of_those_asked_about(self, gate: AdmissionGate, clock: ManualClock) -> None:
        first, _ = self.blocked(gate)
        second, _ = self.blocked(gate)
        self.clear(gate, clock, first)
        for _ in range(3):
            self.poll(gate, second)
            clock.advance(0.01)

    def test_a_cancelled_request_is_forgotten(self, gate: AdmissionGate) -> None:
        req, _ = self.blocked(gate)
        gate.cancel(req)
        self.assert_forgotten(gate, req)
        gate.cancel(req)
        self.poll(gate)

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
        verdict = self.enter(gate, again)
        assert verdict.state is not GateState.FAILED, (
            f"a request whose rid was there before, and was cancelled, is refused: {verdict.reason}"
        )
        gate.cancel(again)
        self.assert_forgotten(gate, again)

    def test_requests_are_read_and_not_changed(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req = self.blocked_request(gate)
        before, said = state_of(req), copy.deepcopy(dict(req.params))
        gate.concerns(req)
        gate.enter(req)
        gate.poll([req])
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        gate.finished(req)
        assert dict(req.params) == said, f"the gate has changed what the request says: {said} is {dict(req.params)} now"
        assert_unchanged(req, before)

    def test_a_finished_request_is_forgotten(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        if gate.finished(req):
            gate.drop(req)
        self.assert_forgotten(gate, req)

    def test_it_tells_of_itself_in_numbers(self, gate: AdmissionGate) -> None:
        """Under names that metrics can have; whatever requests are at it."""
        self.check_stats(gate, "before any request came")
        req, _ = self.blocked(gate)
        self.check_stats(gate, "while it blocks a request")
        gate.cancel(req)
        self.check_stats(gate, "after a request was cancelled")

    def check_stats(self, gate: AdmissionGate, when: str) -> None:
        try:
            found = dict(gate.stats())
        except Exception as error:
            raise AssertionError(f"stats() raises {type(error).__name__}, {when}: {error}") from error
        for name, value in found.items():
            assert re.fullmatch("[a-z][a-z0-9_]*", name), f"a metric cannot be called {name!r}"
            assert math.isfinite(value), f"stats() says that {name} is {value}, {when}"

    def wait_for_release(self, gate: AdmissionGate, clock: ManualClock, req: Req, end: str) -> None:
        """Have `released` name a request once, which is due at its `end`."""
        named = []
        for turn in range(PATIENCE):
            named += [rid for rid in gate.released() if rid == req.rid]
            clock.advance(0.01)
            if not named:
                let_threads_work(turn)
        assert named == [req.rid], f"in {PATIENCE} calls released() has named a request {len(named)} times: once, {end}"

    @capability("holds")
    def test_a_held_request_is_released_once(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req = self.held_request(gate)
        verdict = self.enter(gate, req)
        assert verdict.state is GateState.OPEN, f"enter() answers {verdict} to a request of held_request(): let it pass"
        held = gate.finished(req)
        assert held is True, f"finished() answers {held!r} for a request of held_request(): True holds it"
        assert req.rid not in gate.released(), "released() names a request that is still to be held"
        self.let_go(gate, clock, req)
        end = "when what it is held for has ended. After let_go() of the test class nothing may be left of that"
        self.wait_for_release(gate, clock, req, end)
        self.assert_forgotten(gate, req)

    @capability("holds")
    def test_a_held_request_that_is_dropped_is_forgotten(self, gate: AdmissionGate) -> None:
        req = self.held_request(gate)
        self.enter(gate, req)
        held = gate.finished(req)
        assert held is True, f"finished() answers {held!r} for a request of held_request(): True holds it"
        gate.drop(req)
        self.assert_forgotten(gate, req)
        assert req.rid not in gate.released(), "released() names a request that was dropped"

    @lacks("holds")
    def test_nobody_is_held(self, gate: AdmissionGate, clock: ManualClock) -> None:
        req, _ = self.blocked(gate)
        self.clear(gate, clock, req)
        self.wait_until_open(gate, clock, req)
        held = gate.finished(req)
        assert held is not True, (
            "finished() answers True, which keeps a request's KV until released() names it: declare the capability "
            "`holds` in the record, or answer False"
        )
        assert held is False, f"finished() answers {held!r}: True holds the request's KV, False lets it go"
        named = list(gate.released())
        assert not named, f"released() names {named}, of which none is held"
