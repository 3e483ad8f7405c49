"""Queues longer than what one step may match anew, and the tree of prefixes that is kept from step to step."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from pegboard.conformance.schedule_policy import ReadOnlyCache, queued
from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.prefix_cache import PrefixMatch
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_cache_aware.options import DfsWeightOptions, LpmOptions
from pegboard.plugins.policy_cache_aware.policies import DfsWeightPolicy, LpmPolicy
from pegboard.plugins.policy_cache_aware.tree import PrefixTree

A, B = [1] * 40, [2] * 40


def lpm(cache: ReadOnlyCache, **options: Any) -> SchedulePolicy:
    return LpmPolicy(LpmOptions(fallback_above=None, **options), SchedulePolicyContext(cache=cache))


def dfs(cache: ReadOnlyCache, **options: Any) -> SchedulePolicy:
    return DfsWeightPolicy(DfsWeightOptions(**options), SchedulePolicyContext(cache=cache))


@pytest.mark.parametrize("make", [lpm, dfs])
@pytest.mark.parametrize("limit", [1, 8])
def test_a_step_matches_no_more_than_it_may(make: Any, limit: int) -> None:
    cache = ReadOnlyCache(A)
    policy, waiting = make(cache, rematch_limit=limit), [queued([*A, i]) for i in range(40)]
    policy.order(waiting, [])
    assert cache.matches == 40, "newcomers are matched once"
    for _ in range(3):
        before = cache.matches
        cache.learn(A)
        policy.order(waiting, [])
        assert cache.matches == before + limit


@pytest.mark.parametrize("make", [lpm, dfs])
@pytest.mark.parametrize(("limit", "steps"), [(1, 40), (8, 20)])
def test_no_match_is_older_than_the_bound(make: Any, limit: int, steps: int) -> None:
    """The cache changes at each step and many match nothing, which go first; still all the others are asked for."""
    cache = ReadOnlyCache(A)
    policy = make(cache, rematch_limit=limit)
    waiting = [queued([*(A if i % 2 else B), i, 0]) for i in range(40)]
    policy.order(waiting, [])
    asked: set[int] = set()
    match = cache.match

    def watched(key: PrefixKey) -> PrefixMatch:
        asked.add(int(key.tokens[-1]))
        return match(key)

    cache.match = watched  # type: ignore[method-assign]
    for _ in range(steps):
        cache.learn(A)
        policy.order(waiting, [])
    assert asked == set(range(40)), "somebody's match is out of date"


@pytest.mark.parametrize("make", [lpm, dfs])
def test_a_long_queue_is_ordered_right_in_the_end(make: Any) -> None:
    cache = ReadOnlyCache(A)
    policy = make(cache, rematch_limit=8)
    waiting = [queued([*(A if i % 2 else B), i]) for i in range(40)]
    policy.order(waiting, [])
    cache.learn(B)
    for _ in range(20):
        order = policy.order(waiting, [])
    assert [req.tokens.view(0, 1)[0] for req in order] == [2] * 20 + [1] * 20


def test_stats_tell_the_share_of_steps_in_fallback() -> None:
    policy = LpmPolicy(LpmOptions(fallback_above=2), SchedulePolicyContext(cache=ReadOnlyCache(A)))
    three = [queued([i]) for i in range(3)]
    policy.order(three[:2], [])
    policy.order(three, [])
    policy.order(three, [])
    stats = policy.stats()
    assert (stats["steps"], stats["fallback_steps"]) == (3, 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_kept_tree_orders_as_a_new_one(seed: int, page_size: int) -> None:
    """Requests come and go and match more or less: the tree that went through all of it answers as a fresh one."""
    draw = random.Random(seed)
    kept = PrefixTree(page_size)
    waiting: list[Req] = []
    for _ in range(60):
        waiting = [req for req in waiting if draw.random() < 0.8]
        for _ in range(draw.randrange(6)):
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
            waiting.insert(draw.randrange(len(waiting) + 1), queued(prompt, space=draw.choice(("", "", "other"))))
        lengths = [draw.randrange(req.seq_len + 1) // page_size * page_size for req in waiting]
        kept.place(waiting, lengths)
        fresh = PrefixTree(page_size)
        fresh.place(waiting, lengths)
        assert kept.depth_first(waiting) == fresh.depth_first(waiting)
    kept.place([], [])
    assert len(kept) == 0


def test_a_tree_does_not_grow_with_what_has_gone() -> None:
    """Each passer-by splits the path of the one that stays, at a place of its own."""
    tree = PrefixTree(1)
    stays = queued([0] * 4000)
    for length in range(1, 2000):
        tree.place([stays, queued([0] * length)], [4000, length])
    assert len(tree) <= 3 * 2 + 64


@pytest.mark.parametrize("policy", [LpmPolicy, DfsWeightPolicy])
@pytest.mark.parametrize("later", [0, 1, 9])
def test_requests_that_no_longer_wait_are_let_go(policy: Any, later: int) -> None:
    """Also by a queue that is ordered as it stands, short or long."""
    options = {LpmPolicy: LpmOptions, DfsWeightPolicy: DfsWeightOptions}[policy](fallback_above=8)
    ordering = policy(options, SchedulePolicyContext(cache=ReadOnlyCache(A)))
    waiting = [queued([*A, i]) for i in range(6)]
    gone = {req.rid for req in waiting}
    ordering.order(waiting, [])
    del waiting
    others = [queued([*B, i]) for i in range(later)]
    assert ordering.order(others, []) == others
    gc.collect()
    held = {one.rid for one in gc.get_objects() if isinstance(one, Req)}
    assert not held & gone
