"""Broken schedule policies, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pegboard.core.interfaces.req import Req
from pegboard.core.testing.mutants import Mutant, assert_caught
from pegboard.core.testing.schedule_policy import SchedulePolicyContract
from pegboard.plugins.policy_basic.policies import FcfsPolicy, PriorityPolicy, RandomPolicy
from pegboard.plugins.policy_cache_aware.policies import DfsWeightPolicy, LpmPolicy


class LosesTheLast(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return list(waiting)[:-1] if len(waiting) > 3 else list(waiting)


class RepeatsTheFirst(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return [*waiting, *waiting[:1]]


class OrdersTheRunningToo(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return [*waiting, *running]


class SortsInPlace(PriorityPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        if isinstance(waiting, list):
            waiting.sort(key=lambda req: -req.priority)
        return list(waiting)


class GivesTheQueueItself(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return waiting if isinstance(waiting, list) else list(waiting)


class TouchesRequests(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        for req in waiting:
            req.priority += 1
        return list(waiting)


class LastComeFirstServedAmongEquals(PriorityPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(reversed(list(waiting)), key=lambda req: -req.priority)  # noqa: C414 - that is the bug


class IgnoresTheSeed(RandomPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return random.sample(list(waiting), len(waiting))


class ForgetsAVictim(FcfsPolicy):
    def victims(self, running: Sequence[Req]) -> list[Req]:
        return super().victims(running)[1:]


class PopsVictims(FcfsPolicy):
    def victims(self, running: Sequence[Req]) -> list[Req]:
        answer = super().victims(running)
        if isinstance(running, list):
            running.reverse()
        return answer


class LocksWhatItMatches(LpmPolicy):
    def _matched(self, req: Req) -> int:
        match = self.ctx.cache.match(req.matchable_key())
        self.ctx.cache.lock(match.handle)
        return len(match)


class MatchesOnce(LpmPolicy):
    """Never looks at the cache's version again."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        self.ctx.cache.version = 0
        return super().order(waiting, running)


class AnswersFromMemory(DfsWeightPolicy):
    """Takes a queue of the same length for the same queue."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        if self._answer and len(self._answer) == len(waiting):
            return self._kept
        self._kept = super().order(waiting, running)
        return list(self._kept)


class PeeksAtTheCache(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: -len(self.ctx.cache.match(req.key())))


class ChokesOnNothing(LpmPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        longest = max(req.seq_len for req in waiting)
        return super().order(waiting, running) if longest else list(waiting)


def mutant(factory: type, caught_by: str) -> Mutant:
    return Mutant(factory, suite=SchedulePolicyContract, caught_by=caught_by)


MUTANTS = [
    mutant(LosesTheLast, "test_order_is_a_permutation"),
    mutant(LosesTheLast, "test_a_thousand_requests"),
    mutant(RepeatsTheFirst, "test_one_request"),
    mutant(OrdersTheRunningToo, "test_order_is_a_permutation"),
    mutant(SortsInPlace, "test_arguments_stay_as_they_are"),
    mutant(GivesTheQueueItself, "test_arguments_stay_as_they_are"),
    mutant(TouchesRequests, "test_arguments_stay_as_they_are"),
    mutant(LastComeFirstServedAmongEquals, "test_ties_keep_the_order_of_arrival"),
    mutant(IgnoresTheSeed, "test_same_seed_same_orders"),
    mutant(ForgetsAVictim, "test_victims_are_a_permutation"),
    mutant(PopsVictims, "test_victims_are_a_permutation"),
    mutant(LocksWhatItMatches, "test_does_not_change_the_cache"),
    mutant(MatchesOnce, "test_reads_the_cache"),
    mutant(AnswersFromMemory, "test_the_queue_changes_between_calls"),
    mutant(PeeksAtTheCache, "test_does_not_read_the_cache"),
    mutant(ChokesOnNothing, "test_empty_queue"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
