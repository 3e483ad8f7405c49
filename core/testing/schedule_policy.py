"""The conformance suite of SchedulePolicy."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixMatch
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.testing.properties import properties
from pegboard.core.testing.suite import ContractSuite, capability, lacks

_NAMES = itertools.count()


class ReadOnlyCache(PrefixCache):
    """A prefix cache that knows what it is told to know, can only be matched, and raises for all that changes one.

    `known` are the token lists that it answers for, in the namespace "". `readable` False makes even `match` raise.
    """

    def __init__(self, *known: Sequence[int], page_size: int = 1, readable: bool = True) -> None:
        self.page_size = page_size
        self.version = 0
        self.readable = readable
        self.known = [np.array(tokens, dtype=np.int64) for tokens in known]
        self.matches = 0

    def learn(self, *known: Sequence[int]) -> None:
        """Know these token lists and nothing else."""
        self.known = [np.array(tokens, dtype=np.int64) for tokens in known]
        self.version += 1

    def match(self, key: PrefixKey) -> PrefixMatch:
        if not self.readable:
            raise AssertionError("the policy reads the prefix cache without declaring the capability cache_aware")
        self.matches += 1
        length = 0
        for tokens in self.known if key.namespace == "" else ():
            common = min(len(tokens), len(key))
            differs = np.flatnonzero(tokens[:common] != key.tokens[:common])
            length = max(length, int(differs[0]) if differs.size else common)
        length -= length % self.page_size
        return PrefixMatch(np.arange(length, dtype=np.int64), object())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a schedule policy may read the prefix cache with match(), and change nothing in it")

    lock = unlock = insert = evict = reset = _refuse

    @property
    def evictable_tokens(self) -> int:
        return sum(map(len, self.known))

    @property
    def locked_tokens(self) -> int:
        return 0


def queued(
    prompt: Sequence[int],
    *,
    generated: Sequence[int] = (),
    max_new_tokens: int = 16,
    priority: int = 0,
    space: str = "",
    arrived: float | None = None,
) -> Req:
    """A waiting request; one that has generated tokens was retracted. `arrived` is when it came, now by default."""
    req = Req(
        f"req-{next(_NAMES)}",
        np.array(prompt, dtype=np.int64),
        SamplingParams(max_new_tokens=max_new_tokens),
        priority=priority,
        namespace=space,
        arrived=arrived,
    )
    req.timing.ready = req.timing.queued = req.timing.arrived
    for token in generated:
        req.tokens.append(token)
    if generated:
        req.move_to(ReqStatus.RUNNING)
        req.move_to(ReqStatus.RETRACTED)
    return req


def active(
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    max_new_tokens: int = 16,
    priority: int = 0,
    arrived: float | None = None,
) -> Req:
    """A running request."""
    req = queued(prompt, max_new_tokens=max_new_tokens, priority=priority, arrived=arrived)
    for token in generated:
        req.tokens.append(token)
    req.move_to(ReqStatus.RUNNING)
    req.kv.row = 1
    return req


_TOKENS = st.lists(st.integers(0, 3), max_size=6)
_ARRIVALS = st.sampled_from((0.0, 5.0, 30.0, 1000.0))
_STEMS: tuple[list[int], ...] = ([], [7] * 40, [7] * 40 + [8] * 40, [9] * 64, [5])


@st.composite
def _prompts(draw: st.DrawFn) -> list[int]:
    stem = draw(st.sampled_from(_STEMS))
    return stem + draw(_TOKENS) or [1]


@st.composite
def _waiting(draw: st.DrawFn) -> Req:
    return queued(
        draw(_prompts()),
        generated=draw(st.sampled_from(([], [], [], [1], [2, 3, 4]))),
        max_new_tokens=draw(st.integers(1, 5)),
        priority=draw(st.integers(-2, 2)),
        space=draw(st.sampled_from(("", "", "other"))),
        arrived=draw(_ARRIVALS),
    )


@st.composite
def _running(draw: st.DrawFn) -> Req:
    return active(draw(_prompts()), draw(_TOKENS), priority=draw(st.integers(-2, 2)), arrived=draw(_ARRIVALS))


def _arriving(draw: random.Random) -> Req:
    stem, tail = draw.choice(_STEMS), [draw.randrange(4) for _ in range(draw.randrange(1, 5))]
    return queued([*stem, *tail], max_new_tokens=draw.randrange(1, 6), priority=draw.randrange(-2, 3))


_QUEUES = st.lists(_waiting(), max_size=12)
_CACHES = st.lists(_prompts(), max_size=4)


def _state(req: Req) -> tuple[Any, ...]:
    """What a policy must leave as it is: everything but the slots."""
    kv = req.kv
    return (
        *(req.rid, req.status, req.priority, req.namespace, req.sampling, req.input_len, req.seed, req.flags),
        *(tuple(req.tokens.view()), req.blocked_by, req.stream, req.output.finish_reason, req.output.sent_len),
        *(kv.row, kv.prefix_len, kv.committed_len, kv.allocated_len, kv.cache_len, kv.handle),
        astuple(req.timing),
    )


def _check_permutation(given_: Sequence[Req], answer: Sequence[Req]) -> None:
    __tracebackhide__ = True
    assert isinstance(answer, list), f"the answer is a {type(answer).__name__}, not a list"
    expected, found = Counter(map(id, given_)), Counter(map(id, answer))
    names = [req.rid for req in answer]
    assert not expected - found, f"{sum((expected - found).values())} of {len(given_)} requests are missing in {names}"
    assert not found - expected, f"requests that were not given, or given once and answered twice: {names}"


class SchedulePolicyContract(ContractSuite):
    """What every schedule policy owes the scheduler. An author names the provider, and nothing else."""

    contract = "schedule_policy"

    def policy(self, cache: PrefixCache | None = None, seed: int = 0, now: float = 2000.0) -> SchedulePolicy:
        """The policy under test over a read-only cache: one that must not even be read, where it is not cache-aware."""
        if cache is None:
            cache = ReadOnlyCache([7] * 40, [9] * 10, readable="cache_aware" in self.capabilities)
        policy: SchedulePolicy = self.build(SchedulePolicyContext(cache=cache, seed=seed, clock=lambda: now))
        return policy

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
    @given(waiting=_QUEUES, running=st.lists(_running(), max_size=4), known=_CACHES)
    def test_order_is_a_permutation(self, waiting: list[Req], running: list[Req], known: list[list[int]]) -> None:
        cache = ReadOnlyCache(*known, readable="cache_aware" in self.capabilities)
        _check_permutation(waiting, self.policy(cache).order(waiting, running))

    @properties(max_examples=40)
    @given(waiting=_QUEUES, running=st.lists(_running(), max_size=4))
    def test_arguments_stay_as_they_are(self, waiting: list[Req], running: list[Req]) -> None:
        policy = self.policy()
        before = [_state(req) for req in (*waiting, *running)]
        kept_waiting, kept_running = list(waiting), list(running)
        answers = (policy.order(waiting, running), policy.victims(running))
        for answer in answers:
            answer.clear()  # the answer is the caller's: it must be no argument, and nothing that is remembered
        assert [req.rid for req in waiting] == [req.rid for req in kept_waiting], "order() changed `waiting`"
        assert [req.rid for req in running] == [req.rid for req in kept_running], "`running` was changed"
        assert [_state(req) for req in (*waiting, *running)] == before, "a request was changed"
        _check_permutation(waiting, policy.order(tuple(waiting), tuple(running)))

    @pytest.mark.parametrize("seed", range(4))
    def test_the_queue_changes_between_calls(self, seed: int) -> None:
        """A small life: requests arrive, run, grow, are retracted, and the cache changes under way."""
        draw = random.Random(seed)
        cache = ReadOnlyCache(readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        waiting: list[Req] = []
        running: list[Req] = []
        for _ in range(40):
            waiting += [_arriving(draw) for _ in range(draw.randrange(4))]
            answer = policy.order(waiting, running)
            _check_permutation(waiting, answer)
            taken = answer[: draw.randrange(4)]
            waiting = [req for req in waiting if req not in taken]
            for req in taken:
                req.move_to(ReqStatus.RUNNING)
            running += taken
            for req in running:
                req.tokens.append(draw.randrange(4))
            victims = policy.victims(running)
            _check_permutation(running, victims)
            back = victims[: draw.randrange(2)]
            for req in back:
                req.move_to(ReqStatus.RETRACTED)
            waiting = back + waiting
            running = [req for req in running if req not in back]
            if draw.random() < 0.3:
                cache.learn(*draw.sample(_STEMS, 2))

    def test_ties_keep_the_order_of_arrival(self) -> None:
        waiting = [queued([1, 2, 3]) for _ in range(24)]
        orders = [[req.rid for req in self.policy(seed=seed).order(waiting, [])] for seed in (0, 1)]
        if orders[0] != orders[1]:
            pytest.skip("it draws lots (its order depends on the seed), so nothing is a tie")
        assert orders[0] == [req.rid for req in waiting]

    def test_same_seed_same_orders(self) -> None:
        known = [[7] * 40, [9] * 10]
        waiting = [queued([7] * (40 + i % 3) + [i % 5], priority=i % 4, max_new_tokens=1 + i % 7) for i in range(40)]
        orders = []
        for _ in range(2):
            cache = ReadOnlyCache(*known, readable="cache_aware" in self.capabilities)
            policy = self.policy(cache, seed=11)
            orders.append([[req.rid for req in policy.order(waiting[start:], [])] for start in (0, 3, 0)])
        assert orders[0] == orders[1]

    @properties(max_examples=60)
    @given(running=st.lists(_running(), max_size=10))
    def test_victims_are_a_permutation(self, running: list[Req]) -> None:
        policy = self.policy()
        before, kept = [_state(req) for req in running], list(running)
        victims = policy.victims(running)
        _check_permutation(kept, victims)
        assert victims is not running, "the answer must be a list of its own"
        assert list(map(id, running)) == list(map(id, kept)), "victims() changed `running`"
        assert [_state(req) for req in running] == before, "a request was changed"

    def test_a_thousand_requests(self) -> None:
        stems = [[s] * (50 + s) for s in range(20)]
        waiting = [queued(stems[i % 20] + [i], priority=i % 3, max_new_tokens=1 + i % 90) for i in range(1000)]
        cache = ReadOnlyCache(*stems[:10], readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        for _ in range(3):
            _check_permutation(waiting, policy.order(waiting, []))

    def test_does_not_change_the_cache(self) -> None:
        cache = ReadOnlyCache([7] * 40, [9] * 64, readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        waiting = [queued([*stem, index]) for index, stem in enumerate(_STEMS * 3)]
        policy.order(waiting, [])
        policy.victims([active([7] * 50, [1])])
        assert cache.version == 0

    # Preemption.

    def preemptor(self) -> tuple[Req, list[Req]]:
        """A waiting request and running ones of which it may push out at least one: by default, by its priority.
        Override this where another measure decides.
        """
        running = [active([1, 2, 3], [4, 5]), active([1, 2], [3]), active([9], [9, 9, 9])]
        return queued([5, 6], priority=1000), running

    @capability("preempts")
    def test_somebody_makes_way(self) -> None:
        policy = self.policy()
        req, running = self.preemptor()
        assert policy.preempts, "without this the scheduler does not even ask"
        assert policy.preempt(req, running), "nobody makes way"

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=_waiting(), running=st.lists(_running(), max_size=8))
    def test_preempt_names_running_requests(self, waiting: Req, running: list[Req]) -> None:
        """Each at most once, nobody else, and nothing is changed by the question."""
        policy = self.policy()
        before, kept = [_state(req) for req in (waiting, *running)], list(running)
        named = policy.preempt(waiting, running)
        assert isinstance(named, list)
        assert named is not running
        assert len({id(req) for req in named}) == len(named), "a request is named twice"
        assert {id(req) for req in named} <= {id(req) for req in kept}, "somebody is named who does not run"
        assert list(map(id, running)) == list(map(id, kept))
        assert [_state(req) for req in (waiting, *running)] == before, "a request was changed"

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=_waiting(), running=st.lists(_running(), min_size=1, max_size=8))
    def test_whoever_made_way_does_not_push_back(self, waiting: Req, running: list[Req]) -> None:
        """Or two requests could push each other out for ever, and neither would get on."""
        policy = self.policy()
        for victim in policy.preempt(waiting, running):
            assert not policy.preempt(victim, [waiting])

    @capability("preempts")
    @properties(max_examples=80)
    @given(waiting=_waiting(), running=st.lists(_running(), min_size=1, max_size=8))
    def test_only_the_less_urgent_make_way(self, waiting: Req, running: list[Req]) -> None:
        """Whoever was pushed out stands behind the other in the queue, or it would be next again at once."""
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

    @capability("aging")
    def test_nobody_is_overtaken_for_ever(self) -> None:
        """The least urgent of all comes first at last, however urgent those are that arrive after it."""
        late = 1e7
        policy = self.policy(now=late)
        old = queued([1] * 50, max_new_tokens=100_000, priority=-3, arrived=1.0)
        newcomers = [queued([1], max_new_tokens=1, priority=3, arrived=late) for _ in range(3)]
        assert policy.order([*newcomers, old], [])[0] is old, "it has waited for months and is overtaken still"

    @lacks("preempts")
    def test_nobody_makes_way(self) -> None:
        policy = self.policy()
        req, running = self.preemptor()
        assert not policy.preempts
        assert policy.preempt(req, running) == []

    def test_stats_are_numbers(self) -> None:
        policy = self.policy()
        policy.order([queued([1, 2]), queued([3])], [])
        stats: dict[Any, Any] = policy.stats()
        for name, value in stats.items():
            assert isinstance(name, str), f"the name {name!r} is no string"
            assert isinstance(value, int | float), f"{name} is no number: {value!r}"

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
        waiting = [queued([*stem, index]) for index, stem in enumerate(_STEMS * 4)]
        policy = self.policy(cache)
        for _ in range(2):
            _check_permutation(waiting, policy.order(waiting, []))

    @lacks("cache_aware")
    def test_does_not_read_the_cache(self) -> None:
        cache = ReadOnlyCache(readable=False)
        self.policy(cache).order([queued([*stem, 1]) for stem in _STEMS], [])
