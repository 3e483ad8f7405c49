"""The suite of SchedulePolicy: which request makes way for which, and that no two push each other out for ever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.schedule_policy.base import PolicySuite
from pegboard.conformance.schedule_policy.fakes import (
    ReadOnlyCache,
    active,
    check_named,
    queued,
    running_req,
    state_of,
    waiting_req,
)
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.interfaces.status import ReqStatus


class PreemptionTests(PolicySuite):
    """Of the policies that may let a waiting request push out running ones."""

    contract = "schedule_policy"

    def preemptor(self) -> tuple[Req, list[Req]]:
        """Return a waiting request and running ones of which it may push out at least one: by default, by its priority.
        Override this where another measure decides.
        """
        running = [active([1, 2, 3], [4, 5]), active([1, 2], [3]), active([9], [9, 9, 9])]
        return queued([5, 6], priority=1000), running

    @capability("preempts")
    def test_somebody_makes_way(self) -> None:
        policy = self.policy()
        req, running = self.preemptor()
        assert policy.preempts, "without this the scheduler does not even ask"
        assert policy.preempt(req, running), "no request makes way"

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=waiting_req(), running=st.lists(running_req(), max_size=8))
    def test_preempt_names_running_requests(self, waiting: Req, running: list[Req]) -> None:
        """Each at most once, no others, and nothing is changed by the question."""
        policy = self.policy()
        before, kept = [state_of(req) for req in (waiting, *running)], list(running)
        named = policy.preempt(waiting, running)
        assert named is not running, "preempt() answers with `running` itself: give a list of its own"
        check_named(kept, named)
        assert list(map(id, running)) == list(map(id, kept)), "preempt() changed `running`"
        assert [state_of(req) for req in (waiting, *running)] == before, "a request was changed"

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=waiting_req(), running=st.lists(running_req(), min_size=1, max_size=8))
    def test_whoever_made_way_does_not_push_back(self, waiting: Req, running: list[Req]) -> None:
        """Or two requests could push each other out for ever, and neither would get on."""
        policy = self.policy()
        for victim in policy.preempt(waiting, running):
            assert not policy.preempt(victim, [waiting]), f"{victim} made way for {waiting} and pushes it out in turn"

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=waiting_req(), running=st.lists(running_req(), min_size=1, max_size=8))
    def test_only_the_less_urgent_make_way(self, waiting: Req, running: list[Req]) -> None:
        """A request that was pushed out stands after the other in the queue, or it would be next again at once."""
        policy = self.policy()
        for victim in policy.preempt(waiting, running):
            victim.move_to(ReqStatus.RETRACTED)
            order = policy.order([victim, waiting], [])
            assert order[0] is waiting, f"{victim} made way for {waiting}, but comes before it"

    @capability("preempts")
    def test_preemption_comes_to_rest(self) -> None:
        """Eight requests for two places, over hours of a simulated clock: each pair changes places once at most."""
        draw, now = random.Random(3), [0.0]
        cache = ReadOnlyCache(readable="cache_aware" in self.capabilities)
        policy: SchedulePolicy = self.build(SchedulePolicyContext(cache=cache, clock=lambda: now[0]))
        waiting = [
            queued([1] * draw.randrange(1, 9), max_new_tokens=9000, priority=draw.randrange(3), arrived=draw.random())
            for _ in range(8)
        ]
        running: list[Req] = []
        changes = 0
        for _ in range(400):
            now[0] += 60.0
            for req in policy.order(waiting, running):
                if len(running) == 2:
                    out = policy.preempt(req, running)[:1]
                    if not out:
                        break
                    changes += 1
                    running.remove(out[0])
                    waiting.insert(0, out[0])
                    out[0].move_to(ReqStatus.RETRACTED)
                    out[0].timing.queued = now[0]
                waiting.remove(req)
                running.append(req)
                req.move_to(ReqStatus.RUNNING)
            for req in running:
                req.tokens.append(1)
        assert changes <= 8 * 7 // 2, f"{changes} times a request was pushed out: they take turns"

    @lacks("preempts")
    def test_nobody_makes_way(self) -> None:
        policy = self.policy()
        req, running = self.preemptor()
        assert not policy.preempts
        assert policy.preempt(req, running) == []
