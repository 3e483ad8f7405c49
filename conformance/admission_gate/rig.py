"""What the conformance suite of AdmissionGate works with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from pegboard.conformance.rig.traces import traces
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams

_NAMES = itertools.count()
PATIENCE = 200
"""How often a gate is polled before it counts as one that never opens: a hundredth of a second apart by its clock, and
the last ones by the machine's as well, since its work may be done by a thread."""


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
    params: Mapping[str, Any] | None = None, *, rid: str = "", sampling: SamplingParams | None = None, **fields: Any
) -> Req:
    """Return a waiting request with parameters for gates; `fields` go to Req (principal, priority).

    Its rid is like no other's, so that traces of it can be found.
    """
    name, ids = rid or f"gated-{next(_NAMES)}-request", np.arange(1, 6, dtype=np.int64)
    return Req(name, ids, sampling or SamplingParams(max_new_tokens=4), params=params, **fields)


class GateRig(ContractSuite):
    """What the suite's tests share, and what a subclass says of its gate."""

    params: ClassVar[tuple[str, ...] | None] = None
    """Where in a request's `params` the gate looks: by default under the provider's name. () where it reads none."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def gate(self, clock: ManualClock) -> Iterator[AdmissionGate]:
        built: AdmissionGate = self.build(AdmissionGateContext(clock))
        yield built
        built.close()

    def unconcerned_request(self) -> Req | None:
        """Return a request that has nothing to do with the gate: by default one that asks for nothing. None where every
        request concerns it (a limit of the rate, say), which is tested then.
        """
        return gated_request()

    def blocked_request(self, gate: AdmissionGate) -> Req:
        """Return a new request that the gate blocks when it enters. Override this. It is called several times before
        any of the requests enters, and what else it lets enter must leave each of them blocked.
        """
        pytest.skip("override blocked_request: the suite cannot know what this gate waits for")

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        """Whatever `req` waits for happens now, other requests that blocked_request has let enter included. Override
        this where the clock alone does not bring it about.
        """

    def around(self, gate: AdmissionGate) -> Sequence[object]:
        """Return what the test class has put around the gate, such as a fake of another server: what it keeps is not
        the gate's.
        """
        return ()

    def held_request(self, gate: AdmissionGate) -> Req:
        """Return a new request that passes when it enters and that the gate holds after its end (capability
        `holds`).
        """
        pytest.skip("override held_request: the suite cannot know what this gate holds")

    def let_go(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        """End what `req` is held for. Override this where the clock alone does not bring it about."""

    # What the tests share.

    def enter(self, gate: AdmissionGate, req: Req) -> Verdict:
        """Let a request enter that concerns the gate, and return the verdict."""
        __tracebackhide__ = True
        concerned = gate.concerns(req)
        assert concerned is True, f"concerns() answers {concerned!r} for a request of the test class: it must be True"
        verdict = gate.enter(req)
        assert isinstance(verdict, Verdict), f"enter() answers {verdict!r}, which is not a Verdict"
        return verdict

    def poll(self, gate: AdmissionGate, *reqs: Req) -> Mapping[str, Verdict]:
        """Return the news of requests, which must be of these alone."""
        __tracebackhide__ = True
        news = gate.poll(reqs)
        assert isinstance(news, Mapping), f"poll() answers {news!r}, which is not a mapping from rids to Verdicts"
        others = [rid for rid in news if rid not in {req.rid for req in reqs}]
        assert not others, (
            f"poll() was asked about {[req.rid for req in reqs]} and tells of {others}, too: its keys are rids of the "
            "requests in `blocked`, and of no others"
        )
        values: Mapping[str, object] = news
        odd = {rid: verdict for rid, verdict in values.items() if not isinstance(verdict, Verdict)}
        assert not odd, f"poll() answers {odd}, whose values are not Verdicts"
        return {rid: verdict for rid, verdict in news.items() if isinstance(verdict, Verdict)}

    def blocked(self, gate: AdmissionGate) -> tuple[Req, Verdict]:
        req = self.blocked_request(gate)
        verdict = self.enter(gate, req)
        assert verdict.state is GateState.BLOCKED, (
            f"enter() answers {_told(verdict)} to a request of blocked_request(), which is to be blocked. If that is "
            "the test class's fault: requests of earlier calls may still be blocked, or may not have entered at all"
        )
        return req, verdict

    def wait_until_open(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        last = None
        for turn in range(PATIENCE):
            verdict = last = self.poll(gate, req).get(req.rid, last)
            if verdict is not None and verdict.state is GateState.OPEN:
                gate.passed(req)
                return
            assert verdict is None or verdict.state is GateState.BLOCKED, f"the way was clear, yet: {verdict}"
            clock.advance(0.01)
            let_threads_work(turn)
        pytest.fail(
            f"not open after {PATIENCE} polls, each a hundredth of a second later by ctx.clock; poll() says "
            f"{_told(last) if last else 'nothing of it'}. After clear() of the test class nothing may be left that the "
            "request waits for, such as requests that blocked_request() has let enter"
        )

    def assert_forgotten(self, gate: AdmissionGate, req: Req) -> None:
        __tracebackhide__ = True
        found = traces(gate, req)
        assert not found, f"the request is gone, but the gate keeps it, or its rid, in {', '.join(found)}"

    def names(self) -> tuple[str, ...]:
        """Return the keys of `params` that the gate reads."""
        return self.params if self.params is not None else (self.subject.own_name,)

    def nonsense(self) -> Iterator[tuple[str, Req]]:
        """Yield requests that say what makes no sense, each with what it says."""
        for name in self.names():
            for said in NONSENSE:
                yield f"params[{name!r}] = {said!r}", gated_request({name: said})

    def try_nonsense(self, gate: AdmissionGate, what: str, req: Req) -> bool:
        """Return whether it concerned the gate, which must then take or refuse it, and forget it."""
        __tracebackhide__ = True
        try:
            if not gate.concerns(req):
                return False
            verdict = gate.enter(req)
        except Exception as error:
            text = f"{type(error).__name__}: {error} for {what}"
            raise AssertionError(f"the gate raised {text}. Refuse it: Verdict.failed(..., status=400)") from error
        if verdict.state is GateState.FAILED:
            assert 400 <= verdict.status <= 499, f"{what} is the client's mistake, not the server's: {verdict.status}"
            assert verdict.reason.strip(), "people read the reason"
        gate.cancel(req)
        self.assert_forgotten(gate, req)
        return True


def _told(verdict: Verdict) -> str:
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.state.name}{reason}"


def let_threads_work(turn: int) -> None:
    if turn >= PATIENCE - 50:
        time.sleep(0.02)


def state_of(req: Req) -> dict[str, object]:
    """Return what a gate must leave as it is, as text by field: everything but ReqSlots and the memo of caches."""
    fields = {name: repr(getattr(req, name)) for name in Req.__slots__ if name not in ("slots", "memo", "tokens")}
    return {**fields, "tokens": req.tokens.view().tolist()}


def assert_unchanged(req: Req, before: dict[str, object]) -> None:
    __tracebackhide__ = True
    changed = [f"req.{name}" for name, value in state_of(req).items() if value != before[name]]
    assert not changed, (
        f"the gate has changed {', '.join(changed)}: only the pipeline changes a request. A verdict says what "
        "it is to change (namespace, max_new_tokens), and a ReqSlot has room for the gate's own notes"
    )
