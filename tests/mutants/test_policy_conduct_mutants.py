"""Schedule policies that go wrong after hours, under a long queue or another clock, as plugin authors have written
them: each caught by the test that is meant for it, with a message that says what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import monotonic
from typing import Any

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.schedule_policy import SchedulePolicyContract
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.plugins.policy_basic.policies import FcfsPolicy
from pegboard.plugins.policy_basic.urgency import PriorityPolicy

Reqs = Sequence[Req]


class AsksTheWallClock(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: time.time() - req.timing.arrived < 1e6)


class AsksItsOwnMonotonic(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: monotonic() - req.timing.arrived < 30)


class KeepsTheRealClock(FcfsPolicy):
    """As a default argument, where no watch can see it."""

    def order(self, waiting: Reqs, running: Reqs, clock: Any = time.monotonic) -> list[Req]:
        return sorted(waiting, key=lambda req: clock() - req.timing.arrived < 30)


class AsksOnce(FcfsPolicy):
    def __init__(self, options: Any, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self.now = ctx.clock()

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: self.now - req.timing.arrived < 30)


class BelievesInTheEpoch(FcfsPolicy):
    """A time of day, it thinks."""

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: req.timing.arrived % 86400 // 3600)


class StartsAnew(PriorityPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: req.timing.queued - req.priority * 10)


class KeepsRequests(FcfsPolicy):
    def __init__(self, options: Any, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self.seen: dict[Req, int] = {}

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        for req in waiting:
            self.seen[req] = self.seen.get(req, 0) + 1
        return list(waiting)


_EVERYWHERE: list[Req] = []


class KeepsThemInTheModule(FcfsPolicy):
    def victims(self, running: Reqs) -> list[Req]:
        _EVERYWHERE.extend(running)
        return super().victims(running)


class KeepsTheirNames(FcfsPolicy):
    def __init__(self, options: Any, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self.skipped: dict[str, int] = {}

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        for req in waiting:
            self.skipped[req.rid] = self.skipped.get(req.rid, 0) + 1
        return list(waiting)


class KeepsAHistory(FcfsPolicy):
    def __init__(self, options: Any, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self.waits: list[tuple[str, float]] = []

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        self.waits += [(req.rid, req.timing.arrived) for req in waiting]
        return list(waiting)


class LeavesLongPromptsOut(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return [req for req in waiting if req.input_len <= 8192]


class NeverRetractsLongPrompts(FcfsPolicy):
    def victims(self, running: Reqs) -> list[Req]:
        return [req for req in super().victims(running) if req.input_len < 32768]


class BucketsTooFew(FcfsPolicy):
    """A bucket for every power of two that its author thought of."""

    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        buckets: list[list[Req]] = [[] for _ in range(15)]
        for req in waiting:
            for power in range(15):
                if req.input_len < 2 << power:
                    buckets[power].append(req)
                    break
        return [req for bucket in buckets for req in bucket]


class PicksTheBestAgainAndAgain(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        left, answer = list(waiting), []
        while left:
            best = min(left, key=lambda req: (-req.priority, req.timing.arrived))
            left.remove(best)
            answer.append(best)
        return answer


class LooksThroughItsAnswer(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        answer: list[Req] = []
        for req in sorted(waiting, key=lambda req: -req.priority):
            if req not in answer:
                answer.append(req)
        return answer


class ComparesAllPairs(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        ahead = {id(req): sum(one.priority > req.priority for one in waiting) for req in waiting}
        return sorted(waiting, key=lambda req: ahead[id(req)])


class VictimsByIndex(FcfsPolicy):
    def victims(self, running: Reqs) -> list[Req]:
        return sorted(running, key=lambda req: -list(running).index(req))


class RecursesPerRequest(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return [waiting[0], *self.order(waiting[1:], running)] if waiting else []


class SetsTheOrder(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return list(set(waiting))


class SortsById(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: (-req.priority, req.rid))


class GoesByPlaceInMemory(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=id)


class KeysByTheClientsName(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return list({req.name: req for req in waiting}.values())


class TrustsParams(FcfsPolicy):
    def order(self, waiting: Reqs, running: Reqs) -> list[Req]:
        return sorted(waiting, key=lambda req: req.params.get("fcfs", {}).get("deadline", 0))


def mutant(factory: type, caught_by: str, says: str) -> Mutant:
    return Mutant(factory, suite=SchedulePolicyContract, caught_by=caught_by, says=says)


MUTANTS = [
    mutant(AsksTheWallClock, "test_ctx_clock_is_the_only_clock", "asks time.time()"),
    mutant(AsksItsOwnMonotonic, "test_ctx_clock_is_the_only_clock", "asks time.monotonic()"),
    mutant(AsksItsOwnMonotonic, "test_the_clock_may_start_anywhere", "take the time from ctx.clock()"),
    mutant(KeepsTheRealClock, "test_the_clock_may_start_anywhere", "take the time from ctx.clock()"),
    mutant(AsksOnce, "test_the_clock_may_start_anywhere", "moves on after the policy was built"),
    mutant(BelievesInTheEpoch, "test_the_clock_may_start_anywhere", "ctx.clock begins at 1e+09"),
    mutant(StartsAnew, "test_waiting_does_not_start_anew_after_a_retraction", "timing.queued begins anew"),
    mutant(KeepsRequests, "test_requests_that_are_through_are_let_go", "requests are kept"),
    mutant(KeepsThemInTheModule, "test_requests_that_are_through_are_let_go", "requests are kept"),
    mutant(KeepsTheirNames, "test_requests_that_are_through_are_let_go", "bytes for every request"),
    mutant(KeepsAHistory, "test_requests_that_are_through_are_let_go", "bytes for every request"),
    mutant(LeavesLongPromptsOut, "test_prompts_of_any_length", "40000+0 tokens"),
    mutant(NeverRetractsLongPrompts, "test_prompts_of_any_length", "victims() loses"),
    mutant(BucketsTooFew, "test_prompts_of_any_length", "order() loses"),
    mutant(PicksTheBestAgainAndAgain, "test_the_cost_grows_with_the_queue_and_not_with_its_square", "order() looks at"),
    mutant(LooksThroughItsAnswer, "test_the_cost_grows_with_the_queue_and_not_with_its_square", "order() looks at"),
    mutant(ComparesAllPairs, "test_the_cost_grows_with_the_queue_and_not_with_its_square", "order() looks at"),
    mutant(VictimsByIndex, "test_the_cost_grows_with_the_queue_and_not_with_its_square", "victims() looks at"),
    mutant(RecursesPerRequest, "test_a_thousand_requests", "RecursionError"),
    mutant(SetsTheOrder, "test_ties_keep_the_order_of_arrival", "do not keep their order in `waiting`"),
    mutant(SortsById, "test_ties_keep_the_order_of_arrival", "do not keep their order in `waiting`"),
    mutant(GoesByPlaceInMemory, "test_ties_keep_the_order_of_arrival", "do not keep their order in `waiting`"),
    mutant(KeysByTheClientsName, "test_order_is_a_permutation", "order() loses"),
    mutant(TrustsParams, "test_whatever_clients_say_is_ordered", "AttributeError"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
