"""What each policy promises beyond the suite."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pegboard.conformance.schedule_policy import ReadOnlyCache, active, queued
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_basic.policies import FcfsPolicy, LofPolicy, RandomPolicy


def make(cls: type[SchedulePolicy], seed: int = 0) -> SchedulePolicy:
    return cls(NoOptions(), SchedulePolicyContext(cache=ReadOnlyCache(readable=False), seed=seed))


def where(reqs: Sequence[Req], answer: Sequence[Req]) -> list[int]:
    return [reqs.index(req) for req in answer]


def test_fcfs_serves_the_queue_as_it_stands() -> None:
    waiting = [queued([1], priority=p, max_new_tokens=n) for p, n in ((0, 5), (3, 1), (1, 9))]
    assert make(FcfsPolicy).order(waiting, []) == waiting


def test_lof_takes_the_longest_output_first() -> None:
    waiting = [queued([1], max_new_tokens=n) for n in (5, 9, 5, 100, 9)]
    assert where(waiting, make(LofPolicy).order(waiting, [])) == [3, 1, 4, 0, 2]


def test_random_draws_anew_each_time() -> None:
    waiting = [queued([1]) for _ in range(20)]
    policy = make(RandomPolicy)
    orders = {tuple(where(waiting, policy.order(waiting, []))) for _ in range(10)}
    assert len(orders) == 10


def test_random_follows_the_seed() -> None:
    waiting = [queued([1]) for _ in range(20)]
    first, second = (make(RandomPolicy, seed).order(waiting, []) for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize("first", range(4))
def test_random_lets_everyone_be_first(first: int) -> None:
    waiting = [queued([1]) for _ in range(4)]
    policy = make(RandomPolicy)
    assert waiting[first] in [policy.order(waiting, [])[0] for _ in range(64)]


def test_default_victims_lose_the_least_work() -> None:
    running = [active([1], [1] * 9), active([1], [1]), active([1, 2, 3], [1])]
    assert where(running, make(FcfsPolicy).victims(running)) == [2, 1, 0]
