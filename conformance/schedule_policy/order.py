"""The suite of SchedulePolicy: what `order` and `victims` answer."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.schedule_policy.base import PolicySuite
from pegboard.conformance.schedule_policy.fakes import (
    CACHES,
    QUEUES,
    STEMS,
    Anything,
    ReadOnlyCache,
    active,
    arriving,
    check_permutation,
    queued,
    running_req,
    state_of,
)
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import ReqStatus


class OrderTests(PolicySuite):
    """Each request exactly once, in an order that the queue, the cache and the seed decide."""

    contract = "schedule_policy"

    def test_empty_queue(self) -> None:
        policy = self.policy()
        assert policy.order([], []) == []
        assert policy.order([], [active([1, 2], [3])]) == []
        assert policy.victims([]) == []

    def test_one_request(self) -> None:
        policy, only, running = self.policy(), queued([1]), active([1, 2, 3], [4])
        assert policy.order([only], [running]) == [only]
        assert policy.victims([running]) == [running]

    @properties(max_examples=80)
    @given(waiting=QUEUES, running=st.lists(running_req(), max_size=4), known=CACHES)
    def test_order_is_a_permutation(self, waiting: list[Req], running: list[Req], known: list[list[int]]) -> None:
        cache = ReadOnlyCache(*known, readable="cache_aware" in self.capabilities)
        check_permutation(waiting, self.policy(cache).order(waiting, running))

    @properties(max_examples=40)
    @given(waiting=QUEUES, running=st.lists(running_req(), max_size=4))
    def test_arguments_stay_as_they_are(self, waiting: list[Req], running: list[Req]) -> None:
        policy = self.policy()
        before = [state_of(req) for req in (*waiting, *running)]
        kept_waiting, kept_running = list(waiting), list(running)
        answers = (policy.order(waiting, running), policy.victims(running))
        for answer in answers:
            answer.clear()  # the answer is the caller's: it must be no argument, and nothing that is remembered
        assert [req.rid for req in waiting] == [req.rid for req in kept_waiting], "order() changed `waiting`"
        assert [req.rid for req in running] == [req.rid for req in kept_running], "`running` was changed"
        assert [state_of(req) for req in (*waiting, *running)] == before, "a request was changed"
        check_permutation(waiting, policy.order(tuple(waiting), tuple(running)))

    @pytest.mark.parametrize("seed", range(4))
    def test_the_queue_changes_between_calls(self, seed: int) -> None:
        """A small life: requests arrive, run, grow, are retracted, and the cache changes under way."""
        draw = random.Random(seed)
        cache = ReadOnlyCache(readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        waiting: list[Req] = []
        running: list[Req] = []
        for _ in range(40):
            waiting += [arriving(draw) for _ in range(draw.randrange(4))]
            answer = policy.order(waiting, running)
            check_permutation(waiting, answer)
            taken = answer[: draw.randrange(4)]
            waiting = [req for req in waiting if req not in taken]
            for req in taken:
                req.move_to(ReqStatus.RUNNING)
            running += taken
            for req in running:
                req.tokens.append(draw.randrange(4))
            victims = policy.victims(running)
            check_permutation(running, victims, "victims()")
            back = victims[: draw.randrange(2)]
            for req in back:
                req.move_to(ReqStatus.RETRACTED)
            waiting = back + waiting
            running = [req for req in running if req not in back]
            if draw.random() < 0.3:
                cache.learn(*draw.sample(STEMS, 2))

    def test_ties_keep_the_order_of_arrival(self) -> None:
        """Of requests that differ in nothing but their ids; neither those nor their place in memory decide."""
        names = [f"tie-{index:02}" for index in range(24)]
        by_name = {name: queued([1, 2, 3], rid=name, arrived=5.0) for name in random.Random(4).sample(names, 24)}
        waiting = [by_name[name] for name in random.Random(5).sample(names, 24)]
        orders = [[req.rid for req in self.policy(seed=seed).order(waiting, [])] for seed in (0, 1)]
        if orders[0] != orders[1]:
            pytest.skip("it draws lots (its order depends on the seed), so nothing is a tie")
        assert orders[0] == [req.rid for req in waiting], "requests that are equal do not keep their order in `waiting`"

    def test_same_seed_same_orders(self) -> None:
        """Also for other objects of the same values, as in another process."""
        known = [[7] * 40, [9] * 10]
        orders = []
        for _ in range(2):
            waiting = [
                queued(
                    [7] * (40 + i % 3) + [i % 5],
                    priority=i % 4,
                    max_new_tokens=1 + i % 7,
                    arrived=1.0 * i,
                    rid=f"s-{i}",
                )
                for i in range(40)
            ]
            cache = ReadOnlyCache(*known, readable="cache_aware" in self.capabilities)
            policy = self.policy(cache, seed=11)
            orders.append([[req.rid for req in policy.order(waiting[start:], [])] for start in (0, 3, 0)])
        assert orders[0] == orders[1], "equal requests and the same ctx.seed, but another order"

    @properties(max_examples=60)
    @given(running=st.lists(running_req(), max_size=10))
    def test_victims_are_a_permutation(self, running: list[Req]) -> None:
        policy = self.policy()
        before, kept = [state_of(req) for req in running], list(running)
        victims = policy.victims(running)
        check_permutation(kept, victims, "victims()")
        assert victims is not running, "the answer must be a list of its own"
        assert list(map(id, running)) == list(map(id, kept)), "victims() changed `running`"
        assert [state_of(req) for req in running] == before, "a request was changed"

    def test_a_thousand_requests(self) -> None:
        stems = [[s] * (50 + s) for s in range(20)]
        waiting = [queued(stems[i % 20] + [i], priority=i % 3, max_new_tokens=1 + i % 90) for i in range(1000)]
        cache = ReadOnlyCache(*stems[:10], readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        for _ in range(3):
            check_permutation(waiting, policy.order(waiting, []))
        running = [active(stems[i % 20], [i], priority=i % 3) for i in range(1000)]
        check_permutation(running, policy.victims(running), "victims()")

    def test_prompts_of_any_length(self) -> None:
        """A limit on prompts is the pipeline's affair: what a policy leaves out waits after all others."""
        lengths = (1, 100, 4000, 40_000, 400_000)
        policy = self.policy()
        waiting = [queued([7] * length, max_new_tokens=length) for length in lengths]
        check_permutation(waiting, policy.order(waiting, []))
        for req in waiting:
            check_permutation([req], policy.order([req], []))
        running = [active([7] * length, [1]) for length in lengths]
        check_permutation(running, policy.victims(running), "victims()")

    @pytest.mark.parametrize(
        "said", [None, True, "noon", -1, 1e400, math.nan, 10**400, [], {}, {"x": None}], ids=lambda said: f"{said!r:.9}"
    )
    def test_whatever_clients_say_is_ordered(self, said: object) -> None:
        """`params` come from the network: what makes no sense to a policy must not stop the queue."""
        waiting = [queued([1, 2]), queued([1, 2], params=Anything(said)), queued([3], params={"other": said})]
        policy = self.policy()
        check_permutation(waiting, policy.order(waiting, []))
        for req in waiting:
            req.move_to(ReqStatus.RUNNING)
        check_permutation(waiting, policy.victims(waiting), "victims()")

    def test_does_not_change_the_cache(self) -> None:
        cache = ReadOnlyCache([7] * 40, [9] * 64, readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        waiting = [queued([*stem, index]) for index, stem in enumerate(STEMS * 3)]
        policy.order(waiting, [])
        policy.victims([active([7] * 50, [1])])
        assert cache.version == 0
