"""The keeper of the admission gates: order, time-outs, holding, and gates that misbehave."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import (
    OPEN,
    AdmissionGate,
    AdmissionGateContext,
    GateOptions,
    GateState,
    Verdict,
)
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import FinishType, ReqStatus
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.memory import MemoryCorrupted

BLOCKED = Verdict.blocked("something")


class ScriptedGate(AdmissionGate):
    """Answers as it is told, and keeps a log of what it was asked about each request."""

    def __init__(self, name: str, log: list[str], clock: ManualClock, timeout: float | None) -> None:
        super().__init__(GateOptions(timeout=timeout), AdmissionGateContext(clock))
        self.name = name
        self.log = log
        self.minds: Any = True
        self.at_entry: Any = OPEN
        self.news: Any = {}
        self.holds: Any = False
        self.free: Any = []

    def _say(self, what: str, req: Req, answer: Any) -> Any:
        self.log.append(f"{self.name}.{what} {req.rid}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def concerns(self, req: Req) -> bool:
        return bool(self._say("concerns", req, self.minds))

    def enter(self, req: Req) -> Verdict:
        verdict: Verdict = self._say("enter", req, self.at_entry)
        return verdict

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        for req in blocked:
            self.log.append(f"{self.name}.poll {req.rid}")
        if isinstance(self.news, Exception):
            raise self.news
        news: Mapping[str, Verdict] = self.news
        return news

    def cancel(self, req: Req) -> None:
        self._say("cancel", req, None)

    def finished(self, req: Req) -> bool:
        return bool(self._say("finished", req, self.holds))

    def released(self) -> Any:
        if isinstance(self.free, Exception):
            raise self.free
        return self.free

    def drop(self, req: Req) -> None:
        self._say("drop", req, None)


class Gates:
    """A keeper of scripted gates called a, b, ..."""

    def __init__(self, count: int = 2, timeout: float | None = 60.0) -> None:
        self.clock = ManualClock()
        self.log: list[str] = []
        names = "abcd"[:count]
        self.gates = [ScriptedGate(name, self.log, self.clock, timeout) for name in names]
        self.keeper = GateKeeper(list(zip(names, self.gates, strict=True)), self.clock)

    def __getitem__(self, index: int) -> ScriptedGate:
        return self.gates[index]

    def arrive(self, rid: str = "r") -> tuple[Req, Verdict | None]:
        req = gated_request(rid=rid)
        return req, self.keeper.arrive(req)

    def asked(self) -> list[str]:
        """What the gates were asked since the last look."""
        found, self.log[:] = list(self.log), []
        return found


def test_no_gates_are_nothing() -> None:
    keeper = GateKeeper([], ManualClock())
    assert keeper.arrive(gated_request()) is None
    assert not keeper
    assert not keeper.finish(gated_request())


def test_gates_are_passed_in_order() -> None:
    gates = Gates()
    req, failure = gates.arrive()
    assert failure is None
    assert req.status is ReqStatus.WAITING
    assert gates.asked() == ["a.concerns r", "b.concerns r", "a.enter r", "b.enter r"]
    assert not gates.keeper


def test_a_gate_that_is_not_concerned_never_hears_of_it_again() -> None:
    gates = Gates()
    gates[0].minds = False
    req, _ = gates.arrive()
    gates.keeper.finish(req)
    assert gates.asked() == ["a.concerns r", "b.concerns r", "b.enter r", "b.finished r"]


def test_blocked_at_the_second_gate_the_first_is_not_asked_again() -> None:
    gates = Gates()
    gates[1].at_entry = BLOCKED
    req, failure = gates.arrive()
    assert failure is None
    assert (req.status, req.blocked_by) == (ReqStatus.BLOCKED, "b")
    assert gates.keeper
    assert gates.keeper.blocked == 1
    gates.asked()
    assert not gates.keeper.poll().ready
    gates[1].news = {"r": OPEN}
    assert gates.keeper.poll().ready == [req]
    assert gates.asked() == ["b.poll r", "b.poll r"]
    assert req.blocked_by == ""
    assert not gates.keeper


def test_the_next_gate_is_entered_when_one_opens() -> None:
    gates = Gates()
    gates[0].at_entry = gates[1].at_entry = BLOCKED
    req, _ = gates.arrive()
    assert req.blocked_by == "a"
    gates[0].news = {"r": OPEN}
    gates.clock.advance(5.0)
    assert gates.keeper.poll().ready == []
    assert req.blocked_by == "b"
    (waits,) = gates.keeper.waiting_on()
    assert waits == {"rid": "r", "gate": "b", "reason": "something", "progress": None, "seconds": 0.0}
    gates[1].news = {"r": OPEN}
    assert gates.keeper.poll().ready == [req]


def test_a_gate_behind_that_opens_at_once_costs_no_step() -> None:
    gates = Gates()
    gates[0].at_entry = BLOCKED
    req, _ = gates.arrive()
    gates[0].news = {"r": OPEN}
    assert gates.keeper.poll().ready == [req]


def test_of_whom_there_is_no_news_the_last_verdict_stands() -> None:
    gates = Gates(1)
    gates[0].at_entry = BLOCKED
    gates.arrive()
    gates[0].news = {"r": Verdict.blocked("nearly", 0.75)}
    gates.keeper.poll()
    gates[0].news = {}
    gates.clock.advance(2.0)
    gates.keeper.poll()
    (waits,) = gates.keeper.waiting_on()
    assert (waits["reason"], waits["progress"], waits["seconds"]) == ("nearly", 0.75, 2.0)


def test_a_failure_at_arrival_is_returned_and_leaves_nothing() -> None:
    gates = Gates(3)
    gates[1].at_entry = Verdict.failed("no", status=422, code="because", param="params.x")
    req, failure = gates.arrive()
    assert failure == gates[1].at_entry
    assert req.status is ReqStatus.WAITING
    # Both that know the request are told; the third has never seen it.
    assert gates.asked()[3:] == ["a.enter r", "b.enter r", "a.cancel r", "b.cancel r"]
    assert not gates.keeper
    gates.keeper.cancel(req)
    assert not gates.asked()


def test_a_failure_while_blocked_comes_as_news() -> None:
    gates = Gates(2)
    gates[1].at_entry = BLOCKED
    req, _ = gates.arrive()
    gates.asked()
    gates[1].news = {"r": Verdict.failed("no", status=422, code="because", param="params.x")}
    ((failed, reason),) = gates.keeper.poll().failed
    assert failed is req
    assert (reason.type, reason.message, reason.status) == (FinishType.ABORT, "no", 422)
    assert (reason.code, reason.param) == ("because", "params.x")
    assert gates.asked() == ["b.poll r", "a.cancel r", "b.cancel r"]
    assert not gates.keeper


def test_a_failure_at_the_next_gate_comes_as_news() -> None:
    gates = Gates(2)
    gates[0].at_entry = BLOCKED
    gates[1].at_entry = Verdict.failed("no")
    req, _ = gates.arrive()
    gates[0].news = {"r": OPEN}
    assert [one for one, _ in gates.keeper.poll().failed] == [req]
    assert gates.asked()[-2:] == ["a.cancel r", "b.cancel r"]
    assert not gates.keeper


def test_cancelled_while_blocked() -> None:
    gates = Gates(3)
    gates[1].at_entry = BLOCKED
    req, _ = gates.arrive()
    gates.asked()
    gates.keeper.cancel(req)
    gates.keeper.cancel(req)
    assert gates.asked() == ["a.cancel r", "b.cancel r"]
    assert not gates.keeper
    assert not gates.keeper.waiting_on()


def test_time_runs_out_at_each_gate_anew() -> None:
    gates = Gates(2, timeout=10.0)
    gates[0].at_entry = gates[1].at_entry = Verdict.blocked("the moon", 0.25)
    req, _ = gates.arrive()
    gates.clock.advance(9.5)
    gates[0].news = {"r": OPEN}
    assert not gates.keeper.poll().failed
    gates.clock.advance(9.5)
    assert not gates.keeper.poll().failed
    gates.clock.advance(0.5)
    ((failed, reason),) = gates.keeper.poll().failed
    assert failed is req
    assert (reason.status, reason.message) == (504, "not ready after 10.0 s at the gate 'b': the moon, 25% done")
    assert gates.asked()[-2:] == ["a.cancel r", "b.cancel r"]


def test_open_at_the_last_moment_is_open() -> None:
    gates = Gates(1, timeout=10.0)
    gates[0].at_entry = BLOCKED
    req, _ = gates.arrive()
    gates.clock.advance(11.0)
    gates[0].news = {"r": OPEN}
    assert gates.keeper.poll().ready == [req]


def test_without_a_time_out_it_waits_for_ever() -> None:
    gates = Gates(1, timeout=None)
    gates[0].at_entry = BLOCKED
    gates.arrive()
    gates.clock.advance(1e9)
    assert not gates.keeper.poll().failed


# ---- held --------------------------------------------------------------------------------------------------------


def test_held_until_the_last_holder_lets_go() -> None:
    gates = Gates(3)
    gates[0].holds = gates[2].holds = True
    req, _ = gates.arrive()
    assert gates.keeper.finish(req)
    assert (gates.keeper.held, gates.keeper.blocked) == (1, 0)
    gates[0].free = ["r"]
    assert not gates.keeper.poll().released
    assert gates.keeper
    gates[2].free = ["r", "r", "somebody else"]
    assert gates.keeper.poll().released == [req]
    assert not gates.keeper.poll().released
    assert not gates.keeper


def test_dropped_while_held_tells_the_holders() -> None:
    gates = Gates(2)
    gates[1].holds = True
    req, _ = gates.arrive()
    gates.keeper.finish(req)
    gates.asked()
    gates.keeper.drop(req)
    gates.keeper.drop(req)
    assert gates.asked() == ["b.drop r"]
    assert not gates.keeper
    gates[1].free = ["r"]
    assert not gates.keeper.poll().released


def test_nobody_holds() -> None:
    gates = Gates(2)
    req, _ = gates.arrive()
    gates.asked()
    assert not gates.keeper.finish(req)
    assert not gates.keeper.finish(req)
    assert gates.asked() == ["a.finished r", "b.finished r"], "it is over, and nothing is kept of it"


# ---- gates that misbehave ----------------------------------------------------------------------------------------

NO_VERDICTS = [
    None,
    True,
    "open",
    Verdict("open"),  # type: ignore[arg-type]
    Verdict(GateState.BLOCKED, reason=3),  # type: ignore[arg-type]
    Verdict(GateState.BLOCKED, "so", "half"),  # type: ignore[arg-type]
    Verdict(GateState.FAILED, "so", status=200),
    Verdict(GateState.FAILED, "so", status="400"),  # type: ignore[arg-type]
    RuntimeError("boo"),
]


@pytest.mark.parametrize("answer", NO_VERDICTS, ids=repr)
def test_what_is_no_verdict_fails_the_request_when_it_enters(answer: Any) -> None:
    gates = Gates(2)
    gates[0].at_entry = answer
    _, failure = gates.arrive()
    assert failure is not None
    assert (failure.state, failure.status, failure.code) == (GateState.FAILED, 500, "gate_failed")
    assert failure.reason.startswith("the gate 'a' failed: ")
    assert sum(gates.keeper.failures_by.values()) == 1
    assert not gates.keeper


@pytest.mark.parametrize("answer", [one for one in NO_VERDICTS if not isinstance(one, Exception)], ids=repr)
def test_what_is_no_verdict_fails_the_request_that_is_polled(answer: Any) -> None:
    gates = Gates(1)
    gates[0].at_entry = BLOCKED
    bad, _ = gates.arrive("bad")
    gates.arrive("good")
    gates[0].news = {"bad": answer}
    ((failed, reason),) = gates.keeper.poll().failed
    assert failed is bad
    assert reason.status == 500
    assert gates.keeper.blocked == 1


@pytest.mark.parametrize("news", [RuntimeError("boo"), None, 3, ["x"]], ids=repr)
def test_a_poll_that_fails_fails_those_blocked_there(news: Any) -> None:
    gates = Gates(2)
    gates[0].at_entry = BLOCKED
    gates.arrive("r")
    gates.arrive("s")
    gates[0].at_entry, gates[1].at_entry = OPEN, BLOCKED
    gates.arrive("elsewhere")
    gates[0].news = news
    failed = gates.keeper.poll().failed
    assert {req.rid: reason.status for req, reason in failed} == {"r": 500, "s": 500}
    assert gates.keeper.blocked == 1
    assert sum(gates.keeper.failures_by.values()) == 1


def test_memory_that_is_corrupted_is_no_failure_of_a_gate() -> None:
    gates = Gates(1)
    gates[0].at_entry = BLOCKED
    gates.arrive()
    gates[0].news = MemoryCorrupted("page 3")
    with pytest.raises(MemoryCorrupted):
        gates.keeper.poll()
    gates[0].minds = MemoryCorrupted("page 4")
    with pytest.raises(MemoryCorrupted):
        gates.arrive("other")


def test_concerns_that_raises_refuses() -> None:
    gates = Gates(2)
    gates[1].minds = RuntimeError("boo")
    _, failure = gates.arrive()
    assert failure is not None
    assert failure.status == 500
    assert gates.asked() == ["a.concerns r", "b.concerns r"]


def test_released_that_raises_lets_everybody_go_and_tells_it() -> None:
    gates = Gates(2)
    gates[0].holds = gates[1].holds = True
    req, _ = gates.arrive()
    gates.keeper.finish(req)
    gates.asked()
    gates[0].free = RuntimeError("boo")
    assert not gates.keeper.poll().released, "the other one holds it"
    assert gates.asked() == ["a.drop r"]
    gates[1].free = ["r"]
    assert gates.keeper.poll().released == [req]


@pytest.mark.parametrize("progress", [float("nan"), -0.1, 1.5, 20])
def test_a_progress_that_is_none_is_unknown(progress: float) -> None:
    gates = Gates(1)
    gates[0].at_entry = Verdict.blocked("so", progress)
    _, failure = gates.arrive()
    assert failure is None
    assert gates.keeper.waiting_on()[0]["progress"] is None


def test_the_log_has_the_first_traceback_of_a_call_and_a_line_of_each(caplog: pytest.LogCaptureFixture) -> None:
    gates = Gates(1)
    gates[0].at_entry = RuntimeError("boo")
    with caplog.at_level(logging.ERROR):
        for name in ("r", "s", "t"):
            gates.arrive(name)
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]
    assert "the gate 'a' failed in enter of 't': RuntimeError: boo" in caplog.text
    assert sum(gates.keeper.failures_by.values()) == 3


# ---- all together ------------------------------------------------------------------------------------------------


def erratic(rng: random.Random, otherwise: Any) -> Any:
    """Mostly what is asked for, now and then trouble."""
    return rng.choice([otherwise] * 8 + [RuntimeError("boo"), None, "nonsense"])


@pytest.mark.parametrize("seed", range(40))
def test_no_request_is_lost_whatever_the_gates_do(seed: int) -> None:
    rng = random.Random(seed)
    gates = Gates(3, timeout=3.0)
    blocked: dict[str, Req] = {}
    through: dict[str, Req] = {}
    held: dict[str, Req] = {}
    done = 0
    for number in range(300):
        gates.clock.advance(rng.random())
        for gate in gates.gates:
            gate.at_entry = erratic(rng, rng.choice([OPEN, BLOCKED, BLOCKED, Verdict.failed("no")]))
            verdicts = {rid: rng.choice([OPEN, BLOCKED, Verdict.failed("no"), None]) for rid in [*blocked, "unknown"]}
            gate.news = erratic(rng, {rid: one for rid, one in verdicts.items() if rng.random() < 0.3})
            gate.holds = erratic(rng, rng.random() < 0.3)
            gate.free = erratic(rng, [rid for rid in [*held, "unknown"] if rng.random() < 0.2])
        req, failure = gates.arrive(f"r{number}")
        if failure is not None:
            done += 1
        elif req.status is ReqStatus.BLOCKED:
            blocked[req.rid] = req
        else:
            through[req.rid] = req
        if blocked and rng.random() < 0.2:
            gates.keeper.cancel(blocked.pop(rng.choice(list(blocked))))
            done += 1
        if through and rng.random() < 0.7:
            req = through.pop(rng.choice(list(through)))
            if gates.keeper.finish(req):
                held[req.rid] = req
            else:
                done += 1
        if held and rng.random() < 0.1:
            gates.keeper.drop(held.pop(rng.choice(list(held))))
            done += 1
        news = gates.keeper.poll()
        for req in news.ready:
            through[req.rid] = blocked.pop(req.rid)
        for req, _ in news.failed:
            del blocked[req.rid]
        for req in news.released:
            del held[req.rid]
        done += len(news.failed) + len(news.released)
        assert (gates.keeper.blocked, gates.keeper.held) == (len(blocked), len(held))
        assert bool(gates.keeper) == bool(blocked or held)
        assert {one["rid"] for one in gates.keeper.waiting_on()} == set(blocked)
        assert done + len(blocked) + len(through) + len(held) == number + 1
    assert_each_gate_heard_the_end(gates.log, {*blocked, *through})


def assert_each_gate_heard_the_end(log: list[str], alive: set[str]) -> None:
    """Whoever was asked to let a request in hears once that it ended, and not before it has."""
    entered = [line.replace("enter", "") for line in log if ".enter " in line]
    ended = [
        line.replace("cancel", "").replace("finished", "") for line in log if "cancel" in line or "finished" in line
    ]
    assert len(ended) == len(set(ended)), "told twice"
    assert sorted(ended) == sorted(line for line in entered if line.split()[1] not in alive)
