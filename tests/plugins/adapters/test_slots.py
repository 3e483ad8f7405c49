"""Slots: who gets one, who waits, and for how long."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.adapters.slots import USE, Slots
from pegboard.plugins.adapters.store import Adapter

FAIR = 2.0


@dataclass
class Rig:
    """Slots in virtual time. A request that is `placed` has memory until it is `ended`."""

    count: int
    now: float = 100.0
    adapters: dict[str, Adapter] = field(default_factory=dict)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.slots = Slots(self.count, FAIR)
        self.slots.clock = lambda: self.now

    def req(self, name: str) -> Req:
        self.numbers += 1
        adapter = self.adapters.setdefault(name, Adapter(len(self.adapters) + 1, name, ""))
        req = Req(f"{name}-{self.numbers}", np.array([1]), SamplingParams())
        USE.of(req).adapter = adapter
        adapter.users += 1
        return req

    def offer(self, req: Req, *, placed: bool = True) -> bool:
        adapter = USE.of(req).adapter
        assert adapter is not None
        held = self.slots.hold(req, adapter)
        if held and placed:
            req.kv.row = 1
        return held

    def ended(self, req: Req) -> None:
        self.slots.release(req)
        req.kv.row = NO_ROW
        self.slots.forget(req)

    def plan(self, *reqs: Req) -> list[bool]:
        self.slots.begin_plan()
        return [self.offer(req) for req in reqs]


def test_as_many_adapters_as_slots() -> None:
    rig = Rig(2)
    a, b, c, another = rig.req("a"), rig.req("b"), rig.req("c"), rig.req("a")
    assert rig.plan(a, b, c, another) == [True, True, False, True]
    assert (rig.slots.in_use, rig.slots.waiting) == (2, 1)
    rig.ended(a)
    assert rig.plan(c) == [False], "another request has the slot"
    rig.ended(another)
    assert rig.plan(c) == [True]
    assert rig.adapters["a"].slot == 0
    assert rig.slots.uid(rig.adapters["c"].slot) == rig.adapters["c"].uid


def test_a_request_that_was_not_taken_in_holds_nothing() -> None:
    rig = Rig(1)
    a, b = rig.req("a"), rig.req("b")
    rig.slots.begin_plan()
    assert rig.offer(a, placed=False)
    assert not rig.offer(b)
    assert rig.plan(b) == [True]


def test_one_that_goes_on_keeps_its_slot() -> None:
    """A chunked prompt is offered again in each plan."""
    rig = Rig(1)
    a, b = rig.req("a"), rig.req("b")
    for _ in range(3):
        assert rig.plan(a, b) == [True, False]


def test_the_one_least_recently_given_goes_first() -> None:
    rig = Rig(3)
    for name in "abca":
        req = rig.req(name)
        assert rig.plan(req) == [True]
        rig.ended(req)
    d = rig.req("d")
    assert rig.plan(d) == [True]
    assert {name: bool(one.slot) for name, one in rig.adapters.items()} == {"a": True, "b": False, "c": True, "d": True}


def test_pinned_ones_stay() -> None:
    rig = Rig(2)
    a, b = rig.req("a"), rig.req("b")
    rig.adapters["a"].pinned = True
    rig.plan(a, b)
    rig.ended(a)
    rig.ended(b)
    for name in "cdc":
        req = rig.req(name)
        assert rig.plan(req) == [True]
        rig.ended(req)
    assert rig.adapters["a"].slot


def test_a_slot_is_drained_for_one_that_has_waited() -> None:
    """Requests of its adapter that come later wait; the one that waits gets it as soon as it is empty."""
    rig = Rig(1)
    a, b, later = rig.req("a"), rig.req("b"), rig.req("a")
    assert rig.plan(a, b) == [True, False]
    rig.now += FAIR / 2
    assert rig.plan(later) == [True]
    rig.now += FAIR
    latest = rig.req("a")
    assert rig.plan(b, latest, a, later) == [False, False, True, True]
    rig.ended(a)
    assert rig.plan(latest, b) == [False, False]
    rig.ended(later)
    assert rig.plan(latest, b) == [False, True]
    rig.ended(b)
    assert rig.plan(latest) == [True]


def test_nothing_is_drained_for_one_that_has_gone() -> None:
    rig = Rig(1)
    a, b = rig.req("a"), rig.req("b")
    rig.plan(a, b)
    rig.now += 2 * FAIR
    rig.plan(b)
    rig.slots.forget(b)
    assert rig.plan(rig.req("a")) == [True]


def test_an_adapter_that_is_gone_leaves_its_slot() -> None:
    rig = Rig(1)
    a = rig.req("a")
    rig.adapters["a"].pinned = True
    rig.plan(a)
    rig.ended(a)
    rig.slots.clear(rig.adapters["a"])
    assert rig.plan(rig.req("b")) == [True]


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_ever(seed: int) -> None:
    """Eight adapters want two slots, 2,000 requests, half of them of one. A request may run for a second, so none waits
    longer than it takes to drain a slot for each adapter before it: `FAIR`, and a second and a step, eight times.
    """
    draw, rig = random.Random(seed), Rig(2)
    names = [*"aaaaaaabcdefgh"]
    waiting: list[tuple[float, Req]] = []
    running: list[tuple[float, Req]] = []
    worst = 0.0
    for number in range(4000):
        rig.now += 0.01
        if number < 2000:
            waiting.append((rig.now, rig.req(draw.choice(names))))
        for end, req in [one for one in running if one[0] <= rig.now]:
            rig.ended(req)
            running.remove((end, req))
        rig.slots.begin_plan()
        for since, req in list(waiting):
            if rig.offer(req):
                waiting.remove((since, req))
                worst = max(worst, rig.now - since)
                running.append((rig.now + draw.random(), req))
    assert not waiting
    assert worst <= 8 * (FAIR + 1.02)
    assert all(not adapter.holders for adapter in rig.adapters.values()) == (not running)


@pytest.mark.parametrize(
    ("seed", "others", "count"),
    [(1, 0, 1_000), (2, 1, 1_000), *(pytest.param(seed, seed % 2, 10_000, marks=pytest.mark.full) for seed in (3, 4))],
)
def test_nobody_waits_longer_than_twice_fair_after_and_a_step(seed: int, others: int, count: int) -> None:
    """Eight adapters want two slots, in virtual time, and some requests run for minutes. A request gains a token in
    each step of 20 ms in which it has its slot.
    """
    draw, rig, step = random.Random(seed), Rig(2 + others), 0.02
    if others:  # a slot that is not to be had
        rig.plan(pinned := rig.req("pinned"))
        rig.adapters["pinned"].pinned = True
        rig.ended(pinned)
    waiting: list[tuple[float, Req]] = []
    running: dict[Req, int] = {}
    left: dict[Req, int] = {}
    worst, taken, made = 0.0, 0, 0
    while made < count or waiting or running:
        rig.now += step
        for _ in range(min(count - made, draw.choice((0, 0, 1, 4)) if len(waiting) < 60 else 0)):
            req = rig.req(draw.choice("abcdefgh"))
            left[req] = draw.choice((1, 5, 20, 100, count if made < 200 else 300))
            waiting.append((rig.now, req))
            made += 1
        if len(running) > 100:
            for req in list(running)[:50]:  # they are through
                left[req] = 0
        for req in list(running):
            req.tokens.append(1)
            left[req] -= 1
            if left[req] <= 0:
                rig.ended(req)
                del running[req]
        rig.slots.begin_plan()
        for req in rig.slots.overdue():
            rig.slots.release(req)
            req.kv.row = NO_ROW
            del running[req]
            waiting.insert(0, (rig.now, req))
            taken += 1
        for since, req in list(waiting):
            if rig.offer(req):
                waiting.remove((since, req))
                worst = max(worst, rig.now - since)
                running[req] = 1
    assert worst <= 2 * FAIR + step + 1e-6
    assert taken > count / 100
    assert not any(adapter.holders for adapter in rig.adapters.values())


def test_one_that_has_gained_nothing_is_spared() -> None:
    """However late it is: otherwise no one would get on."""
    rig = Rig(1)
    a, b = rig.req("a"), rig.req("b")
    rig.plan(a, b)
    rig.now += 3 * FAIR
    assert rig.plan(b) == [False]
    assert rig.slots.overdue() == []
    a.tokens.append(5)
    assert rig.slots.overdue() == [a]
    rig.now -= 2 * FAIR
    assert rig.slots.overdue() == []


def test_those_who_cannot_all_be_last_go_one_after_the_other() -> None:
    """Three want one slot, at the same time: the holder is overdue early, so that the last one waits no longer."""
    rig = Rig(1)
    held, *others = (rig.req(name) for name in "abcd")
    rig.plan(held, *others)
    held.tokens.append(5)
    for waited, due in ((FAIR, False), (FAIR * 1.3, False), (FAIR * 1.34, True)):
        rig.now = 100.0 + waited
        rig.slots.begin_plan()
        assert bool(rig.slots.overdue()) == due, waited


def test_all_who_want_an_adapter_that_was_refused_wait_without_being_asked() -> None:
    """In this plan: its waiting requests count, and in the next one the slot may be free."""
    rig = Rig(1)
    first, refused, behind = rig.req("a"), rig.req("b"), rig.req("b")
    adapter = rig.adapters["b"]
    rig.plan(first)
    rig.slots.begin_plan()
    assert not rig.slots.refused(behind, adapter)
    assert not rig.offer(refused)
    assert rig.slots.refused(behind, adapter)
    assert rig.slots.waiting == 2
    assert not rig.slots.refused(first, rig.adapters["a"])
    rig.ended(first)
    rig.slots.begin_plan()
    assert not rig.slots.refused(behind, adapter)
    assert rig.offer(refused)
    assert rig.offer(behind)
