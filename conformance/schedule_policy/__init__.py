"""The conformance suite of SchedulePolicy."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.schedule_policy.conduct import ConductTests
from pegboard.conformance.schedule_policy.cost import CostTests
from pegboard.conformance.schedule_policy.fakes import STEMS, ReadOnlyCache, active, check_permutation, queued
from pegboard.conformance.schedule_policy.order import OrderTests
from pegboard.conformance.schedule_policy.preemption import PreemptionTests
from pegboard.conformance.suite import capability, lacks

__all__ = ["ReadOnlyCache", "SchedulePolicyContract", "active", "queued"]


class SchedulePolicyContract(OrderTests, ConductTests, CostTests, PreemptionTests):
    """What every schedule policy owes the scheduler. An author names the provider, and nothing else."""

    contract = "schedule_policy"

    def test_stats_are_numbers(self) -> None:
        policy = self.policy()
        policy.order([queued([1, 2]), queued([3])], [])
        stats: dict[Any, Any] = policy.stats()
        for name, value in stats.items():
            assert isinstance(name, str), f"the name {name!r} is not a string"
            assert isinstance(value, int | float), f"{name} is not a number: {value!r}"

    @capability("cache_aware")
    def test_reads_the_cache(self) -> None:
        """Of two requests that differ in nothing else, which one is cached decides, also once that has changed."""
        first, second = [1] * 64, [2] * 64
        cache = ReadOnlyCache(first)
        policy = self.policy(cache)
        waiting = [queued([*first, 5]), queued([*second, 5])]
        cold = policy.order(waiting, [])
        cache.learn(second)
        assert cache.matches > 0, "cache_aware is declared, but the cache was never asked"
        assert policy.order(waiting, []) != cold, "the order does not follow what the cache holds"

    @capability("cache_aware")
    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_cached_pages(self, page_size: int) -> None:
        """Matches come in whole pages, and a prompt may be shorter than one."""
        cache = ReadOnlyCache([7] * 40 + [8] * 40, [9] * 64, page_size=page_size)
        waiting = [queued([*stem, index]) for index, stem in enumerate(STEMS * 4)]
        policy = self.policy(cache)
        for _ in range(2):
            check_permutation(waiting, policy.order(waiting, []))

    @lacks("cache_aware")
    def test_does_not_read_the_cache(self) -> None:
        cache = ReadOnlyCache(readable=False)
        self.policy(cache).order([queued([*stem, 1]) for stem in STEMS], [])
