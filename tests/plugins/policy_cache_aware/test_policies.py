"""Orders of lpm and dfs-weight on queues small enough to work out by hand, and what they ask of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.schedule_policy import ReadOnlyCache, queued
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_cache_aware.options import DfsWeightOptions, LpmOptions
from pegboard.plugins.policy_cache_aware.policies import DfsWeightPolicy, LpmPolicy

A, B, C = [1] * 40, [2] * 40, [3] * 40


def lpm(cache: ReadOnlyCache, **options: Any) -> SchedulePolicy:
    return LpmPolicy(LpmOptions(**options), SchedulePolicyContext(cache=cache))


def dfs(cache: ReadOnlyCache, **options: Any) -> SchedulePolicy:
    return DfsWeightPolicy(DfsWeightOptions(**options), SchedulePolicyContext(cache=cache))


def where(policy: SchedulePolicy, waiting: Sequence[Req]) -> list[int]:
    return [list(waiting).index(req) for req in policy.order(waiting, [])]


def test_longest_match_first() -> None:
    waiting = [queued([*C, 1]), queued([*A[:10], 9]), queued([*A, 1]), queued([*B[:20], 9])]
    assert where(lpm(ReadOnlyCache(A, B)), waiting) == [2, 3, 1, 0]


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached from end to end counts for one token less."""
    waiting = [queued(A), queued([*B, 5])]
    assert where(lpm(ReadOnlyCache(A, B)), waiting) == [1, 0]


def test_namespaces_share_nothing() -> None:
    waiting = [queued([*A, 1], space="adapter"), queued([*A[:10], 9])]
    assert where(lpm(ReadOnlyCache(A)), waiting) == [1, 0]


def test_of_a_group_the_first_fills_the_cache() -> None:
    """Requests 0, 1, 3 share 40 tokens that nobody has computed: one goes first, the others behind request 2."""
    waiting = [queued([*A, 1]), queued([*A, 2]), queued([5]), queued([*A, 3]), queued([*B, 1])]
    assert where(lpm(ReadOnlyCache()), waiting) == [0, 2, 4, 1, 3]
    assert where(lpm(ReadOnlyCache(), in_batch_check_threshold=-1), waiting) == [0, 1, 2, 3, 4]


def test_a_group_in_the_cache_is_not_held_back() -> None:
    waiting = [queued([5]), queued([*A, 1]), queued([*A, 2])]
    assert where(lpm(ReadOnlyCache(A)), waiting) == [1, 2, 0]


@pytest.mark.parametrize(("shared", "held_back"), [(31, False), (32, True), (33, True)])
def test_deprioritize_threshold(shared: int, held_back: bool) -> None:
    stem = [1] * shared
    waiting = [queued([*stem, 7, 7]), queued([*stem, 8, 8]), queued([5])]
    assert where(lpm(ReadOnlyCache()), waiting) == ([0, 2, 1] if held_back else [0, 1, 2])


@pytest.mark.parametrize(("cached", "held_back"), [(31, True), (32, True), (33, False)])
def test_check_threshold(cached: int, held_back: bool) -> None:
    """With up to 32 tokens in the cache a request is compared with the others that wait."""
    waiting = [queued([*A, 7, 7]), queued([*A, 8, 8]), queued([5])]
    assert where(lpm(ReadOnlyCache(A[:cached])), waiting) == ([0, 2, 1] if held_back else [0, 1, 2])


def test_groups_of_different_namespaces_are_different() -> None:
    waiting = [queued([*A, 1], space="x"), queued([*A, 2], space="y"), queued([5])]
    assert where(lpm(ReadOnlyCache()), waiting) == [0, 1, 2]


@pytest.mark.parametrize(("limit", "falls_back"), [(128, True), (129, False), (0, False), (None, False)])
def test_fallback(limit: int | None, falls_back: bool) -> None:
    waiting = [queued([5, i]) for i in range(128)] + [queued([*A, 1])]
    cache = ReadOnlyCache(A)
    first = where(lpm(cache, fallback_above=limit), waiting)[0]
    assert first == (0 if falls_back else 128)
    assert cache.matches == (0 if falls_back else 129)


def test_defaults_are_sglangs() -> None:
    options = LpmOptions()
    assert options.fallback_above == 128
    assert options.in_batch_check_threshold == options.in_batch_deprioritize_threshold == 32
    assert not DfsWeightOptions().fallback_above


@pytest.mark.parametrize("make", [lpm, dfs])
def test_matches_are_remembered_until_the_cache_changes(make: Any) -> None:
    cache = ReadOnlyCache(A)
    policy, waiting = make(cache), [queued([*A, i]) for i in range(5)]
    policy.order(waiting, [])
    policy.order(waiting, [])
    assert cache.matches == 5
    waiting.append(queued([*A, 9]))
    policy.order(waiting, [])
    assert cache.matches == 6, "a newcomer costs its own match"
    waiting[0].tokens.append(7)
    policy.order(waiting, [])
    assert cache.matches == 7, "a request that grew is asked for again"
    cache.learn(B)
    policy.order(waiting, [])
    assert cache.matches == 13


def test_a_match_belongs_to_the_cache_that_gave_it() -> None:
    waiting = [queued([5]), queued([*A, 1])]
    assert where(lpm(ReadOnlyCache(A)), waiting) == [1, 0]
    assert where(lpm(ReadOnlyCache(B)), waiting) == [0, 1]


@pytest.mark.parametrize("make", [lpm, dfs])
def test_one_request_needs_no_match(make: Any) -> None:
    cache = ReadOnlyCache(A)
    make(cache).order([queued(A)], [])
    assert cache.matches == 0


def test_heavier_branches_first() -> None:
    waiting = [queued([5]), queued([*A, 1]), queued([*B, 1]), queued([*A, 2]), queued([*B, 2]), queued([*B, 3])]
    assert where(dfs(ReadOnlyCache(A, B)), waiting) == [2, 4, 5, 1, 3, 0]


def test_depth_first_and_a_node_after_what_is_below_it() -> None:
    """A splits into A+x (weight 1) and A+y (weight 2), and one request ends at A; B alone weighs less than A."""
    x, y = [*A, 7, 7], [*A, 8, 8]
    waiting = [queued([*B, 1]), queued([*A, 1]), queued([*x, 1]), queued([*y, 1]), queued([*y, 2])]
    assert where(dfs(ReadOnlyCache(x, y, B)), waiting) == [3, 4, 2, 1, 0]


def test_equal_weights_keep_arrival() -> None:
    waiting = [queued([*stem, i]) for i, stem in enumerate((C, A, B, A, C, B))]
    assert where(dfs(ReadOnlyCache(A, B, C)), waiting) == [0, 4, 1, 3, 2, 5]


def test_branches_of_namespaces_are_apart() -> None:
    waiting = [queued([*A, 1]), queued([*A, 1], space="x"), queued([*A, 2])]
    assert where(dfs(ReadOnlyCache(A)), waiting) == [0, 2, 1]


def test_a_deep_chain_of_prefixes() -> None:
    """Deeper than Python's recursion limit."""
    long = list(range(1500))
    waiting = [queued([*long[:n], 5000 + n]) for n in range(1, 1500)]
    order = where(dfs(ReadOnlyCache(long)), waiting)
    assert order == list(reversed(range(1499)))


def test_dfs_falls_back_where_told() -> None:
    waiting = [queued([5]), queued([*A, 1])]
    assert where(dfs(ReadOnlyCache(A), fallback_above=1), waiting) == [0, 1]
    assert where(dfs(ReadOnlyCache(A)), waiting) == [1, 0]


@pytest.mark.parametrize(
    "bad", [{"fallback_above": -1}, {"in_batch_check_threshold": -2}, {"in_batch_deprioritize_threshold": 0}]
)
def test_bad_options_are_refused(bad: dict[str, int]) -> None:
    model: type[Options] = LpmOptions
    with pytest.raises(ValueError, match=next(iter(bad))):
        model(**bad)
