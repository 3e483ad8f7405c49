"""The planner: chunks, decodes and parts of prompts take turns, and who is pushed out for whom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy
from pegboard.core.pipeline.guards import GuardedPolicy
from tests.core.pipeline.harness import IGNORE, Harness, oracle


def test_chunks_are_bounded_and_alternate_with_decodes() -> None:
    harness = Harness(chunk=16)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    modes = [work.forward_mode for work in harness.model.batches[1:14]]
    extends = [work for work in harness.model.batches if work.forward_mode is ForwardMode.EXTEND]
    assert max(int(work.extend_lens.sum()) for work in extends) <= 16
    assert not any(a is b is ForwardMode.EXTEND for a, b in itertools.pairwise(modes)), "a running request starved"
    assert harness.tokens("long") == oracle(list(range(100)), 4)


def test_prefill_first_restores_the_reference_order() -> None:
    harness = Harness(chunk=16, prefill_first=True)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    modes = [work.forward_mode for work in harness.model.batches[1:8]]
    assert modes == [ForwardMode.EXTEND] * 7


def test_mixed_chunk_carries_decodes() -> None:
    harness = Harness(chunk=16, mixed_chunk=True)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    mixed = [work for work in harness.model.batches if work.forward_mode is ForwardMode.MIXED]
    assert len(mixed) >= 6
    assert all(int(work.extend_lens.sum()) <= 16 for work in mixed)


@pytest.mark.parametrize("fails", range(1, 8))
def test_no_part_of_a_split_outlives_the_chunk_that_it_read(fails: int) -> None:
    harness = Harness(loop="overlap", prefill_first=True, split_prefill_layers=2, chunk=16)
    calls = iter(range(1, 1000))
    harness.model.fail_on = lambda work: next(calls) == fails
    prompt = list(range(100, 125))
    harness.submit("x", [5] * 4, 12, **IGNORE)
    harness.submit("c", prompt, 6, **IGNORE)
    harness.run()
    for rid, asked, n in (("x", [5] * 4, 12), ("c", prompt, 6)):
        if harness.finish(rid)["type"] != "abort":
            assert harness.tokens(rid) == oracle(asked, n, ignore_eos=True), rid


def test_a_split_that_nobody_wants_ends_within_a_step() -> None:
    for loop in ("normal", "overlap"):
        harness = Harness(loop=loop, split_prefill_layers=1)
        harness.submit("d", [1, 2], 60, **IGNORE)
        for _ in range(3):
            harness.step()
        harness.submit("s", list(range(100)), 5)
        while not harness.scheduler.planner.under_way:
            harness.step()
        harness.scheduler.receive([AbortRequest(rid="s")])
        harness.step()
        assert "s" not in harness.scheduler.requests.alive
        harness.run()
        assert harness.scheduler.counters.generated_tokens == 60


def test_newcomers_join_however_many_decodes_are_mixed_in() -> None:
    harness = Harness(mixed_chunk=True, max_prefill_tokens=4)
    for i in range(4):
        harness.submit(f"d{i}", [i, 1], 60, **IGNORE)
    for _ in range(6):
        harness.step()
    harness.submit("late", [9, 9, 9], 2, **IGNORE)
    for _ in range(4):
        harness.step()
    assert harness.tokens("late") == oracle([9, 9, 9], 2, ignore_eos=True)
    harness.run()


def test_who_is_pushed_out_makes_room_for_certain() -> None:
    """What the victim shares stays locked by another, so it would be pushed out in vain: it runs on."""

    class First(SchedulePolicy):
        preempts = True

        def __init__(self) -> None:
            pass

        def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
            return list(waiting)

        def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
            return [one for one in running if one.rid == "low"]

    harness = Harness(tokens=300, max_context_len=300, new_token_ratio=1.0)
    harness.scheduler.planner.policy = GuardedPolicy(First())
    shared = list(range(200))
    harness.submit("low", shared, 20, **IGNORE)
    for _ in range(2):
        harness.step()
    harness.submit("high", [*shared, 1, 2], 30, **IGNORE)
    for _ in range(3):
        harness.step()
    harness.submit("late", [9] * 60, 20, **IGNORE)
    harness.run()
    assert harness.scheduler.counters.preemptions == 0
    assert harness.tokens("late") == oracle([9] * 60, 20, ignore_eos=True)


def test_a_chunk_and_a_decode_alternate_in_the_overlap_loop_too() -> None:
    """Also where the planner has to wait for results, for want of memory."""
    harness = Harness(loop="overlap", split_prefill_layers=1, tokens=140, cache="none", estimate_max_new_tokens=1)
    long = [[k] * 20 for k in range(250) if len(oracle([k] * 20, 60)) == 60][:3]
    for i, prompt in enumerate(long):
        harness.submit(f"d{i}", prompt, 60)
    for _ in range(8):
        harness.step()
    harness.submit("s", list(range(harness.memory.available_tokens - 12)), 1)
    harness.model.batches.clear()
    harness.run()
    modes = [
        work.forward_mode is ForwardMode.DECODE for work in harness.model.batches if work.part or len(work.rows) > 1
    ]
    both = itertools.pairwise(modes)
    assert not any(not first and not second for first, second in both), "two parts in a row while decodes could run"
