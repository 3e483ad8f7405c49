"""Parked requests: in no batch until they are resumed, with their memory or, once others need it, without."""

from __future__ import annotations

import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.planner import GIVE_WAY_SECONDS
from tests.core.pipeline.harness import IGNORE, Harness, oracle


def parked(harness: Harness, rid: str) -> Req:
    """Park a request whose results are all known, as whoever parks one does after a commit."""
    in_flight, harness.scheduler.loop.in_flight = harness.scheduler.loop.in_flight, None
    if in_flight is not None:
        harness.scheduler.settle(in_flight)
    req = harness.scheduler.requests.alive[rid]
    harness.scheduler.planner.park(req)
    return req


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_parked_request_goes_on_where_it_was(loop: str) -> None:
    harness = Harness(loop=loop)
    for rid, token in (("a", 1), ("b", 2)):
        harness.submit(rid, [token] * 9, 20, **IGNORE)
    for _ in range(4):
        harness.step()
    req = parked(harness, "a")
    before = req.output_len
    for _ in range(5):
        harness.step()
    assert req.output_len == before
    assert all(req.kv.row not in work.rows for work in harness.model.batches[-3:])
    harness.scheduler.planner.resume(req)
    harness.run()
    assert harness.tokens("a") == oracle([1] * 9, 20, ignore_eos=True)
    assert harness.tokens("b") == oracle([2] * 9, 20, ignore_eos=True)
    assert harness.scheduler.counters.retractions == 0


def parked_for(seconds: float) -> tuple[Harness, Req]:
    """Return a harness with little memory, in which a request was parked so long ago."""
    clock = ManualClock()
    harness = Harness(tokens=24, run=1, cache="none", parts={"clock": clock})
    harness.submit("a", [1] * 9, 12, **IGNORE)
    for _ in range(3):
        harness.step()
    req = parked(harness, "a")
    clock.advance(seconds)
    return harness, req


@pytest.mark.parametrize("long", [False, True])
def test_memory_is_given_away_only_after_a_while(long: bool) -> None:
    harness, req = parked_for(GIVE_WAY_SECONDS * (2 if long else 0.5))
    harness.submit("b", [2] * 16, 6, **IGNORE)
    for _ in range(3):
        harness.step()
    assert (req.status is ReqStatus.RETRACTED) == long
    assert ("b" in harness.outputs or harness.scheduler.running.reqs != []) == long
    assert req in harness.scheduler.planner.parked
    assert req not in harness.scheduler.waiting
    harness.scheduler.planner.resume(req)
    harness.run()
    assert harness.tokens("a") == oracle([1] * 9, 12, ignore_eos=True)
    assert harness.tokens("b") == oracle([2] * 16, 6, ignore_eos=True)


def test_one_that_gave_way_goes_on_before_those_that_wait() -> None:
    """It is retracted while it is parked, and a third request waits when it is resumed."""
    harness, req = parked_for(GIVE_WAY_SECONDS * 2)
    for rid, token in (("b", 2), ("c", 3)):
        harness.submit(rid, [token] * 16, 6, **IGNORE)
    for _ in range(3):
        harness.step()
    assert req.status is ReqStatus.RETRACTED
    assert [one.rid for one in harness.scheduler.waiting] == ["c"]
    harness.scheduler.planner.resume(req)
    assert [one.rid for one in harness.scheduler.waiting] == ["a", "c"]
    harness.run()
    assert list(harness.outputs) == ["b", "a", "c"]
    for rid, token, length, n in (("a", 1, 9, 12), ("b", 2, 16, 6), ("c", 3, 16, 6)):
        assert harness.tokens(rid) == oracle([token] * length, n, ignore_eos=True)


def test_a_prompt_in_chunks_gets_the_memory_of_one_that_is_parked() -> None:
    clock = ManualClock()
    harness = Harness(tokens=24, run=1, cache="none", chunk=4, parts={"clock": clock})
    harness.submit("a", [1] * 6, 14, **IGNORE)
    for _ in range(2):
        harness.step()
    planner = harness.scheduler.planner
    req = parked(harness, "a")
    harness.submit("b", [2] * 16, 2, **IGNORE)
    harness.step()
    chunked = planner.chunked
    assert chunked is not None
    planner.resume(req)
    while (
        harness.memory.available_tokens >= chunked.seq_len - chunked.kv.scheduled_len or chunked.kv.scheduled_len < 12
    ):
        harness.step()
    parked(harness, "a")
    clock.advance(GIVE_WAY_SECONDS * 0.5)
    harness.step()
    meanwhile = req.status
    assert meanwhile is ReqStatus.RUNNING
    clock.advance(GIVE_WAY_SECONDS)
    for _ in range(5):
        harness.step()
    assert req.status is ReqStatus.RETRACTED
    assert harness.tokens("b") == oracle([2] * 16, 2, ignore_eos=True)
    planner.resume(req)
    harness.run()
    assert harness.tokens("a") == oracle([1] * 6, 14, ignore_eos=True)
