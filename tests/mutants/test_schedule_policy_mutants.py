"""Broken schedule policies, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.schedule_policy import SchedulePolicyContract
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import ReqStatus
from pegboard.plugins.policy_basic.policies import FcfsPolicy, RandomPolicy
from pegboard.plugins.policy_basic.urgency import PriorityPolicy, SrtfPolicy
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
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        for req in waiting:
            self.ctx.cache.lock(self.ctx.cache.match(req.matchable_key()).handle)
        return super().order(waiting, running)


class MatchesOnce(LpmPolicy):
    """Never looks at the cache's version again."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        self.ctx.cache.version = 0
        return super().order(waiting, running)


class AnswersFromMemory(DfsWeightPolicy):
    """Takes a queue of the same length for the same queue."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        if self._answer and len(self._answer) == len(waiting):
            return self._kept  # type: ignore[has-type]
        self._kept = super().order(waiting, running)
        return list(self._kept)


class PeeksAtTheCache(FcfsPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: -len(self.ctx.cache.match(req.key())))


class ChokesOnNothing(LpmPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        longest = max(req.seq_len for req in waiting)
        return super().order(waiting, running) if longest else list(waiting)


class PushesOutItself(PriorityPolicy):
    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return [*super().preempt(req, running), req]


class PushesOutTwice(PriorityPolicy):
    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return super().preempt(req, running) * 2


class RetractsByItself(PriorityPolicy):
    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        named = super().preempt(req, running)
        for one in named:
            one.move_to(ReqStatus.RETRACTED)
        return named


class NeverPreempts(PriorityPolicy):
    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return []


class PushesOutThoseBefore(PriorityPolicy):
    """Compares plain priorities although the queue is ordered by aged ones."""

    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return [one for one in running if one.priority < req.priority]


class PushesOutEquals(PriorityPolicy):
    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return [one for one in running if one.priority <= req.priority]


class TakesTurns(PriorityPolicy):
    """Among equals whoever has run longest gives way."""

    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        equals = [one for one in running if one.priority == req.priority and one.output_len > req.output_len]
        return super().preempt(req, running) or equals


class PreemptsUndeclared(FcfsPolicy):
    preempts = True

    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        return [one for one in running if one.priority < req.priority]


class ForgetsWhoWaited(PriorityPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: -req.priority)


class AgesBackwards(SrtfPolicy):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: req.remaining_tokens - req.timing.arrived)


class TellsNoNumbers(FcfsPolicy):
    def stats(self) -> dict[str, Any]:
        return {"steps": None}


def mutant(factory: type, caught_by: str, says: str = "") -> Mutant:
    return Mutant(factory, suite=SchedulePolicyContract, caught_by=caught_by, says=says)


MUTANTS = [
    mutant(LosesTheLast, "test_order_is_a_permutation"),
    mutant(LosesTheLast, "test_a_thousand_requests", "1 of 1000 requests"),
    mutant(RepeatsTheFirst, "test_one_request"),
    mutant(RepeatsTheFirst, "test_a_thousand_requests", "more than once"),
    mutant(OrdersTheRunningToo, "test_order_is_a_permutation", "they run already"),
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
    mutant(PushesOutItself, "test_preempt_names_running_requests", "which it was not asked about"),
    mutant(PushesOutTwice, "test_preempt_names_running_requests", "more than once"),
    mutant(RetractsByItself, "test_preempt_names_running_requests"),
    mutant(NeverPreempts, "test_somebody_makes_way"),
    mutant(PushesOutThoseBefore, "test_only_the_less_urgent_make_way"),
    mutant(PushesOutEquals, "test_whoever_made_way_does_not_push_back"),
    mutant(TakesTurns, "test_preemption_comes_to_rest"),
    mutant(PreemptsUndeclared, "test_nobody_makes_way"),
    mutant(ForgetsWhoWaited, "test_nobody_is_overtaken_for_ever"),
    mutant(AgesBackwards, "test_nobody_is_overtaken_for_ever"),
    mutant(TellsNoNumbers, "test_stats_are_numbers"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
