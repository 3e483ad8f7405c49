"""What a review found, so that it stays found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy
from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.guards import GuardedPolicy
from tests.core.pipeline.harness import Harness, oracle

IGNORE: dict[str, Any] = {"sampling": {"ignore_eos": True}}


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


@pytest.mark.parametrize("fails", range(1, 12))
def test_a_launch_that_fails_loses_no_changes_of_the_table(fails: int) -> None:
    harness = Harness(loop="overlap")
    model, calls = harness.model, iter(range(1, 1000))

    def launch(work: Any) -> Done:
        if next(calls) == fails:
            raise RuntimeError("out of memory before anything was done")
        return Done(model(work))

    harness.scheduler.stages.executor._launch = launch  # type: ignore[attr-defined]
    for rid in "abcd":
        harness.submit(rid, [ord(rid), 1, 2], 12, **IGNORE)
    harness.run()
    assert all(harness.tokens(rid) == oracle([ord(rid), 1, 2], 12, ignore_eos=True) for rid in "abcd")


class Wrong(SchedulePolicy):
    """Answers with what is no answer."""

    preempts = True

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> Any:
        return self.answer(waiting)

    def victims(self, running: Sequence[Req]) -> Any:
        return self.answer(running)

    def preempt(self, req: Req, running: Sequence[Req]) -> Any:
        return self.answer(running)


def lazily(reqs: Any) -> Any:
    yield from reqs[:1]
    raise RuntimeError("later")


def emptied(reqs: Any) -> Any:
    reqs.clear()
    return reqs


@pytest.mark.parametrize(
    "answer",
    [lambda reqs: None, lazily, lambda reqs: [None, *reqs], lambda reqs: [*reqs, *reqs], lambda reqs: [], emptied],
    ids=["none", "lazy", "junk", "twice", "nobody", "emptied"],
)
def test_whatever_a_policy_answers_everybody_is_served(answer: Any) -> None:
    harness = Harness(tokens=120, max_running_requests=3, estimate_max_new_tokens=1)
    harness.scheduler.planner.policy = GuardedPolicy(Wrong(answer))
    for i in range(6):
        harness.submit(f"r{i}", [i, 1, 2], 30)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle([i, 1, 2], 30) for i in range(6))


@pytest.mark.parametrize("method", ["match", "lock", "unlock", "evict"])
def test_a_cache_that_raises_once_costs_reuse_only(method: str) -> None:
    harness = Harness(tokens=128)
    real, calls = getattr(harness.memory.cache, method), iter(range(1, 10**6))

    def sometimes(*args: Any) -> Any:
        # After the work is done, where doing it twice would be another mistake.
        if next(calls) == 3 and method != "unlock":
            raise RuntimeError(method)
        return real(*args)

    setattr(harness.memory.cache, method, sometimes)
    for i in range(6):
        harness.submit(f"r{i}", [i] * 20, 20, **IGNORE)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle([i] * 20, 20, ignore_eos=True) for i in range(6))


def test_a_split_that_nobody_wants_ends_within_a_step() -> None:
    for loop in ("normal", "overlap"):
        harness = Harness(loop=loop, split_prefill_layers=1)
        harness.submit("d", [1, 2], 60, **IGNORE)
        for _ in range(3):
            harness.step()
        harness.submit("s", list(range(100)), 5)
        while harness.scheduler.planner.split is None:
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
