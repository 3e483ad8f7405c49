"""Stages with memory of their own: where it is short, less urgent requests and parked ones give theirs up."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.prefix_cache import PrefixMatch
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage, StepView, Wait
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.planner import GIVE_WAY_SECONDS
from tests.core.pipeline.harness import IGNORE, Harness, oracle
from tests.core.pipeline.test_parking import parked
from tests.plugins.recurrent_states.state_harness import StateHarness
from tests.plugins.windows.window_harness import WindowHarness

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class Places(Stage):
    """Has so many places; a request takes as many as its first token says."""

    name = "places"

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken: dict[str, int] = {}
        self.planned: dict[str, int] = {}

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def unplaced(self, req: Req) -> None:
        self.taken.pop(req.rid, None)

    def begin_plan(self) -> None:
        self.planned = {}

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        wanted, known = int(req.prompt_ids[0]), {**self.planned, **self.taken}
        if req.rid not in known and sum(known.values()) + wanted > self.count:
            return Wait.SHORT
        self.planned[req.rid] = wanted
        return take

    def pack(self, step: StepView, extras: BatchExtras) -> None:
        for req in step.batch.reqs:
            self.taken[req.rid] = int(req.prompt_ids[0])
        assert sum(self.taken.values()) <= self.count


def run_all(harness: Harness, asked: dict[str, tuple[list[int], int]]) -> None:
    harness.run()
    for rid, (prompt, n) in asked.items():
        assert harness.tokens(rid) == oracle(prompt, n, ignore_eos=True), rid


@LOOPS
@pytest.mark.parametrize(("wanted", "gone"), [(1, 1), (3, 2)])
def test_as_many_give_way_as_are_needed(loop: str, wanted: int, gone: int) -> None:
    """Four requests have a place each, and one place is free where three are wanted."""
    harness = Harness(joining=[Places(4 + (wanted > 1))], policy="priority", loop=loop)
    asked = {f"low{number}": ([1, number, 3], 40) for number in range(4)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    for _ in range(4):
        harness.step()
    assert len(harness.scheduler.running) == 4
    asked["high"] = ([wanted, 9, 9], 4)
    harness.submit("high", *asked["high"], priority=5, **IGNORE)
    run_all(harness, asked)
    assert harness.scheduler.counters.preemptions == gone
    assert next(iter(harness.outputs)) == "high", "it waits until others end"


def test_one_that_is_passed_over_after_others_gave_way_holds_up_none() -> None:
    class Skips(Places):
        def clip(self, req: Req, start: int, take: int) -> int | Wait:
            found = super().clip(req, start, take)
            if found is Wait.SHORT or req.rid != "high" or not self.skips_high:
                return found
            del self.planned[req.rid]
            return Wait.SKIP

        skips_high = True

    stage = Skips(2)
    harness = Harness(joining=[stage], policy="priority")
    asked = {f"low{number}": ([1, number, 3], 12) for number in range(2)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    for _ in range(3):
        harness.step()
    for rid, priority in (("high", 5), ("mid", 4)):
        asked[rid] = ([1, priority, 9], 4)
        harness.submit(rid, *asked[rid], priority=priority, **IGNORE)
    harness.step()
    assert harness.scheduler.counters.preemptions == 1
    assert "mid" in {req.rid for req in harness.scheduler.running.reqs}, "it waits for the one before it"
    stage.skips_high = False
    run_all(harness, asked)


def test_none_gives_way_to_one_that_is_not_more_urgent() -> None:
    harness = Harness(joining=[Places(2)], policy="priority")
    asked = {f"r{number}": ([1, number, 3], 12) for number in range(3)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    run_all(harness, asked)
    assert harness.scheduler.counters.preemptions == harness.scheduler.counters.retractions == 0


@pytest.mark.parametrize("long", [False, True])
def test_one_that_is_parked_gives_its_place_away_after_a_while(long: bool) -> None:
    clock = ManualClock()
    harness = Harness(joining=[Places(1)], parts={"clock": clock})
    asked = {"a": ([1] * 9, 12), "b": ([1] * 16, 6)}
    harness.submit("a", *asked["a"], **IGNORE)
    for _ in range(3):
        harness.step()
    req = parked(harness, "a")
    clock.advance(GIVE_WAY_SECONDS * (2 if long else 0.5))
    harness.submit("b", *asked["b"], **IGNORE)
    for _ in range(3):
        harness.step()
    assert (req.status is ReqStatus.RETRACTED) == long
    assert bool(harness.scheduler.running) == long
    harness.scheduler.planner.resume(req)
    run_all(harness, asked)


def test_a_prompt_in_chunks_gets_the_place_of_one_that_is_parked() -> None:
    """Its later chunks need more than its first one, which is all that it was admitted with."""

    class Chunks(Places):
        def clip(self, req: Req, start: int, take: int) -> int | Wait:
            if req.rid == "long" and start and "a" in self.taken:
                return Wait.SHORT
            return take

    clock = ManualClock()
    harness = Harness(joining=[Chunks(9)], chunk=4, cache="none", parts={"clock": clock})
    asked = {"a": ([1] * 3, 12), "long": ([1, *range(15)], 3)}
    harness.submit("a", *asked["a"], **IGNORE)
    for _ in range(2):
        harness.step()
    req = parked(harness, "a")
    harness.submit("long", *asked["long"], **IGNORE)
    for _ in range(4):
        harness.step()
    chunked = harness.scheduler.planner.chunked
    assert chunked is not None
    assert chunked.kv.scheduled_len == 4
    clock.advance(GIVE_WAY_SECONDS * 2)
    for _ in range(8):
        harness.step()
    assert req.status is ReqStatus.RETRACTED
    assert harness.tokens("long")
    harness.scheduler.planner.resume(req)
    run_all(harness, asked)


def test_none_gives_way_while_a_step_of_a_stage_comes_first() -> None:
    """Nothing is admitted then, so what others would give up were for nothing."""

    class Holds(Stage):
        name = "holds"
        on = False

        def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
            return Interest(look=False) if message.rid == "held" else None

        def clip(self, req: Req, start: int, take: int) -> int | Wait:
            return Wait.HOLD if self.on else take

    holds = Holds()
    harness = Harness(joining=[holds, Places(2)], policy="priority")
    asked = {f"low{number}": ([1, number, 3], 30) for number in range(2)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    for _ in range(3):
        harness.step()
    holds.on = True
    for rid, priority in (("held", 9), ("high", 5)):
        asked[rid] = ([1, priority, 9], 4)
        harness.submit(rid, *asked[rid], priority=priority, **IGNORE)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.counters.preemptions == 0
    holds.on = False
    run_all(harness, asked)
    assert harness.scheduler.counters.preemptions == 2


def test_prefixes_of_requests_that_are_skipped_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skips(Places):
        def skips(self, req: Req) -> bool:
            return len(self.taken) >= self.count

    harness, looked = Harness(joining=[Skips(1)]), list[str]()
    match = harness.memory.match

    def noted(req: Req) -> PrefixMatch:
        looked.append(req.rid)
        return match(req)

    monkeypatch.setattr(harness.memory, "match", noted)
    asked = {f"r{number}": ([1, number, 3], 8) for number in range(20)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    run_all(harness, asked)
    assert len(looked) <= 2 * len(asked), "each plan looks for the prefixes of all that wait"


def test_one_whose_skips_raises_waits(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Places):
        broken = True

        def skips(self, req: Req) -> bool:
            if self.broken:
                raise RuntimeError("boom")
            return False

    stage = Breaks(2)
    harness = Harness(joining=[stage])
    harness.submit("a", [1, 2, 3], 4, **IGNORE)
    for _ in range(3):
        harness.step()
    assert [req.rid for req in harness.scheduler.waiting] == ["a"]
    assert "skips raised" in caplog.text
    stage.broken = False
    run_all(harness, {"a": ([1, 2, 3], 4)})


@LOOPS
@pytest.mark.parametrize("made", [StateHarness, WindowHarness])
def test_an_urgent_request_gets_state_slots_and_window_pages(loop: str, made: Any) -> None:
    harness = made(loop=loop, policy="priority", count=12)
    asked = {f"low{number}": ([number, 2, 3], 60) for number in range(8)}
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    for _ in range(6):
        harness.step()
    assert 0 < len(harness.scheduler.running) < 8
    asked["high"] = ([9, 9, 9], 4)
    harness.submit("high", *asked["high"], priority=5, **IGNORE)
    run_all(harness, asked)
    assert harness.scheduler.counters.preemptions >= 1
    assert next(iter(harness.outputs)) == "high", "it waits until others end"
