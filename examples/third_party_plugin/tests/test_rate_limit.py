"""The rate, the burst, and that keys do not know of each other."""

from pegboard.conformance.admission_gate import ManualClock
from pegboard.conformance.fakes import make_req
from pegboard.core.interfaces import AdmissionGateContext, GateState, Req

from pegboard_example_plugin.options import RateLimitOptions
from pegboard_example_plugin.rate_limit import RateLimit


def requests(count: int, principal: str) -> list[Req]:
    return [make_req(f"{principal}-{number}", principal=principal) for number in range(count)]


def test_each_key_has_a_rate_of_its_own() -> None:
    clock = ManualClock()
    gate = RateLimit(RateLimitOptions(per_second=2.0, burst=2, waiting=2), AdmissionGateContext(clock))
    ann = requests(6, "ann")
    verdicts = [gate.enter(one) for one in ann]
    open_, blocked, failed = GateState.OPEN, GateState.BLOCKED, GateState.FAILED
    assert [one.state for one in verdicts] == [open_, open_, blocked, blocked, failed, failed]
    assert (verdicts[-1].status, verdicts[-1].code) == (429, "rate_limit_exceeded")
    assert [gate.enter(one).state for one in requests(2, "ben")] == [open_, open_]
    assert gate.poll(ann[2:4]) == {}
    clock.advance(0.5)
    assert list(gate.poll(ann[2:4])) == ["ann-2"]
    gate.cancel(ann[3])
    clock.advance(60.0)
    later = [gate.enter(one).state for one in requests(5, "ann")]
    assert later == [open_, open_, blocked, blocked, failed], "a pause saves up a burst and no more"


def test_no_request_overtakes_those_that_wait() -> None:
    clock = ManualClock()
    gate = RateLimit(RateLimitOptions(per_second=1.0, burst=1, waiting=5), AdmissionGateContext(clock))
    first, waits, late = requests(3, "ann")
    gate.enter(first)
    assert gate.enter(waits).state is GateState.BLOCKED
    clock.advance(1.0)
    assert gate.enter(late).state is GateState.BLOCKED
    assert list(gate.poll([waits, late])) == [waits.rid]
