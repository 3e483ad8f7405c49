"""The suite of SchedulePolicy: what a long queue costs, counted in looks at requests and not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard.conformance.schedule_policy.base import PolicySuite
from pegboard.conformance.schedule_policy.fakes import ReadOnlyCache, active, check_permutation, queued
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy

_MOST = 7
"""By what the cost of a call may grow where the queue grows fourfold: n log n comes to less than 5, n squared to 16."""


class _Looks:
    count = 0
    limit = 0


class _TooOften(BaseException):
    """Past what is allowed: nothing of a policy's may catch it."""


class _Counted(Req):
    """A request that counts each look at one of its parts and each comparison with another one."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        _note()
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        _note()
        return self is other

    def __hash__(self) -> int:
        _note()
        return id(self) >> 4


def _note() -> None:
    _Looks.count += 1
    if _Looks.count > _Looks.limit:
        raise _TooOften


class CostTests(PolicySuite):
    """A policy is asked in every step, so a queue of thousands must not cost a step the square of it."""

    contract = "schedule_policy"

    def test_the_cost_grows_with_the_queue_and_not_with_its_square(self) -> None:
        n = 250
        for call in (_order, _victims, _preempt):
            name = call.__name__[1:]
            few = self._count(n, call, 1 << 62)
            limit = _MOST * max(few, n)
            assert self._count(4 * n, call, limit) <= limit, (
                f"{name}() looks at requests {few} times for {n} of them, and more than {limit} times for four times "
                "as many: sort once, and look things up in a set or a dict and not in a list"
            )

    def _count(self, n: int, call: Callable[[SchedulePolicy, list[Req], list[Req]], Any], limit: int) -> int:
        """Return how often a policy looks at requests and asks the cache, when it is called for the second time."""
        stems = [[stem] * 40 for stem in range(1, 9)]
        cache = ReadOnlyCache(*stems[:4], readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        _Looks.limit = 1 << 62
        waiting: list[Req] = [
            queued([*stems[i % 8], i, i], max_new_tokens=1 + i * 7 % 90, priority=i % 5, arrived=1.0 * i, kind=_Counted)
            for i in range(n)
        ]
        running: list[Req] = [
            active(stems[i % 8], [i] * (i % 7), priority=i % 5, arrived=1.0 * i, kind=_Counted) for i in range(n)
        ]
        waiting.reverse()
        call(policy, waiting[: n // 2], running)  # a queue that grows, so that answers from memory do not help
        _Looks.count, _Looks.limit, asked = 0, limit, cache.matches
        try:
            call(policy, waiting, running)
        except _TooOften:
            return limit + 1
        finally:
            _Looks.limit = 1 << 62
        return _Looks.count + cache.matches - asked

    @pytest.mark.full
    def test_ten_thousand_requests(self) -> None:
        """More than recursion can follow, each of them once."""
        waiting = [queued([i % 50] * 20 + [i], priority=i % 3, arrived=1.0 * i) for i in range(10_000)]
        policy = self.policy(ReadOnlyCache([1] * 20, readable="cache_aware" in self.capabilities))
        for _ in range(2):
            check_permutation(waiting, policy.order(waiting, []))
        running = [active([i % 50] * 20, [i], priority=i % 3, arrived=1.0 * i) for i in range(10_000)]
        check_permutation(running, policy.victims(running), "victims()")


def _order(policy: SchedulePolicy, waiting: list[Req], running: list[Req]) -> object:
    return policy.order(waiting, running[:8])


def _victims(policy: SchedulePolicy, waiting: list[Req], running: list[Req]) -> object:
    return policy.victims(running[: len(waiting)])


def _preempt(policy: SchedulePolicy, waiting: list[Req], running: list[Req]) -> object:
    return policy.preempt(waiting[0], running[: len(waiting)])
