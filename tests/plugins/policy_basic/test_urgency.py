"""Priority and srtf: orders worked out by hand, the bounds that aging promises, and who gives way to whom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.schedule_policy import ReadOnlyCache, active, queued
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_basic.options import PriorityOptions, SrtfOptions
from pegboard.plugins.policy_basic.urgency import PriorityPolicy, SrtfPolicy

CTX = SchedulePolicyContext(cache=ReadOnlyCache(readable=False))


def priority(**options: Any) -> SchedulePolicy:
    return PriorityPolicy(PriorityOptions(**options), CTX)


def srtf(**options: Any) -> SchedulePolicy:
    return SrtfPolicy(SrtfOptions(**options), CTX)


def where(reqs: Sequence[Req], answer: Sequence[Req]) -> list[int]:
    return [list(reqs).index(req) for req in answer]


@pytest.mark.parametrize("aging", [None, 10.0])
def test_priority_then_arrival(aging: float | None) -> None:
    waiting = [queued([1], priority=p, arrived=3.0) for p in (0, 5, -1, 5, 0)]
    assert where(waiting, priority(aging=aging).order(waiting, [])) == [1, 3, 0, 4, 2]


@pytest.mark.parametrize(("seconds", "first"), [(19.0, 1), (21.0, 0)])
def test_waiting_counts_as_priority(seconds: float, first: int) -> None:
    """Two points are twenty seconds."""
    waiting = [queued([1], priority=0, arrived=100.0), queued([1], priority=2, arrived=100.0 + seconds)]
    assert where(waiting, priority(aging=10).order(waiting, []))[0] == first
    assert where(waiting, priority(aging=None).order(waiting, []))[0] == 1


def test_a_retraction_does_not_cost_the_turn() -> None:
    waiting = [queued([1], arrived=5.0), queued([1], arrived=6.0)]
    waiting[0].timing.queued = 500.0
    assert where(waiting, priority().order(waiting, [])) == [0, 1]


def test_time_at_a_gate_is_not_waiting() -> None:
    waiting = [queued([1], arrived=5.0), queued([1], arrived=6.0)]
    waiting[0].timing.ready = 50.0
    assert where(waiting, priority().order(waiting, [])) == [1, 0]


@pytest.mark.parametrize(("levels", "aging"), [(5, 2.0), (3, 10.0)])
def test_nobody_waits_longer_than_the_bound(levels: int, aging: float) -> None:
    """One served per second, but more than one arrives: all wait, and none for longer than its bound.

    Whoever overtakes came at most ``(P - p) * aging`` seconds later; all others before it were there already.
    """
    draw, policy = random.Random(1), priority(aging=aging)
    waiting: list[Req] = []
    served: list[tuple[Req, int]] = []
    for second in range(600):
        if second < 400:
            waiting += [
                queued([1], priority=draw.choice((0, levels, levels)), arrived=second + i / 4)
                for i in range(draw.choice((1, 1, 2)))
            ]
        if waiting:
            served.append((policy.order(waiting, [])[0], second))
            waiting.remove(served[-1][0])
    rank = {id(req): place for place, (req, _) in enumerate(served)}
    overtaken = 0
    for req, _ in served:
        for other, _ in served:
            if other.timing.arrived > req.timing.arrived and rank[id(other)] < rank[id(req)]:
                overtaken += 1
                assert other.timing.arrived - req.timing.arrived < (other.priority - req.priority) * aging
    assert overtaken > 50, "priorities made no difference, so the bound was not tested"


def test_priority_gives_up_the_least_urgent_first_and_then_the_least_work() -> None:
    running = [
        active([1], [1] * 9, priority=0, arrived=1.0),
        active([1], [1], priority=3, arrived=1.0),
        active([1], [1] * 2, priority=0, arrived=1.0),
        active([1, 2], [1] * 2, priority=0, arrived=1.0),
    ]
    for policy in (priority(), priority(aging=None)):
        assert where(running, policy.victims(running)) == [3, 2, 0, 1]


def test_whoever_has_waited_long_is_not_retracted_before_newcomers() -> None:
    running = [active([1], [1], priority=0, arrived=1.0), active([1], [1] * 9, priority=2, arrived=100.0)]
    assert where(running, priority(aging=10).victims(running)) == [1, 0]
    assert where(running, priority(aging=None).victims(running)) == [0, 1]


@pytest.mark.parametrize(("threshold", "given_way"), [(1, [2, 3, 0]), (2, [2, 3]), (5, [2]), (6, [])])
def test_preempt_threshold(threshold: float, given_way: list[int]) -> None:
    running = [active([1], [1], priority=p, arrived=1.0) for p in (4, 5, 0, 3)]
    named = priority(preempt_threshold=threshold).preempt(queued([1], priority=5, arrived=1.0), running)
    assert where(running, named) == given_way


def test_nobody_gives_way_where_preemption_is_off() -> None:
    policy = priority(preempt=False)
    assert not policy.preempts
    assert policy.preempt(queued([1], priority=9), [active([1], [1], priority=0)]) == []


def test_age_protects_whoever_runs_but_pushes_nobody_out() -> None:
    """Who stands first in the queue by its age runs, and a later one of a higher priority does not push it out."""
    policy = priority(aging=10)
    old = active([1], [1], priority=0, arrived=0.0)
    assert policy.preempt(queued([1], priority=5, arrived=39.0), [old]) == [old]
    assert policy.preempt(queued([1], priority=5, arrived=41.0), [old]) == []
    new = active([1], [1], priority=0, arrived=1000.0)
    assert policy.preempt(queued([1], priority=0, arrived=0.0), [new]) == []


def test_shortest_remaining_time_first() -> None:
    waiting = [
        queued([1], max_new_tokens=100, arrived=1.0),
        queued([1] * 1000, max_new_tokens=50, arrived=1.0),
        queued([1] * 5000, max_new_tokens=50, arrived=1.0),
        queued([1], generated=[1] * 90, max_new_tokens=100, arrived=1.0),
    ]
    assert where(waiting, srtf().order(waiting, [])) == [3, 1, 0, 2]
    assert where(waiting, srtf(prefill_weight=0).order(waiting, [])) == [3, 1, 2, 0]


def test_an_expected_length_in_place_of_the_limit() -> None:
    """Whoever outlives the expectation is thought to end with its next token."""
    waiting = [
        queued([1], max_new_tokens=30, arrived=1.0),
        queued([1] * 100, max_new_tokens=10_000, arrived=1.0),
        queued([1], generated=[1] * 60, max_new_tokens=10_000, arrived=1.0),
    ]
    assert where(waiting, srtf().order(waiting, [])) == [0, 2, 1]
    assert where(waiting, srtf(expected_output_tokens=50).order(waiting, [])) == [2, 0, 1]


@pytest.mark.parametrize(("seconds", "first"), [(6.0, 1), (8.0, 0)])
def test_srtf_ages(seconds: float, first: int) -> None:
    """70 tokens more are seven seconds at ten tokens each."""
    waiting = [
        queued([1], max_new_tokens=100, arrived=1.0),
        queued([1], max_new_tokens=30, arrived=1.0 + seconds),
    ]
    assert where(waiting, srtf(aging=10).order(waiting, []))[0] == first
    assert where(waiting, srtf(aging=None).order(waiting, []))[0] == 1


def test_srtf_gives_up_the_longest_first() -> None:
    running = [active([1], [1] * 9, max_new_tokens=n, arrived=1.0) for n in (20, 100, 10)]
    assert where(running, srtf().victims(running)) == [1, 0, 2]


@pytest.mark.parametrize(
    ("model", "bad"),
    [
        (PriorityOptions, {"aging": 0}),
        (PriorityOptions, {"aging": float("inf")}),
        (PriorityOptions, {"preempt_threshold": 0}),
        (SrtfOptions, {"prefill_weight": -1}),
        (SrtfOptions, {"expected_output_tokens": 0}),
        (SrtfOptions, {"aging": -1}),
    ],
)
def test_bad_options_are_refused(model: type[Options], bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        model(**bad)
