"""The suite of SchedulePolicy: where it has the time from, and that it keeps nothing for ever."""

from __future__ import annotations

import gc
import random
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.conformance.rig.footprint import growth
from pegboard.conformance.schedule_policy.base import PolicySuite
from pegboard.conformance.schedule_policy.fakes import ReadOnlyCache, active, queued
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus

_OTHER_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns")
_ORIGINS = (3.0, 1e9)
"""What the engine's clock may begin with: a simulated one near zero, and one that no machine has been up for."""

_ROUNDS, _PER_ROUND, _SLACK = 100, 16, 48 * 1024


class _Watched(Req):
    __slots__ = ("__weakref__",)


class ConductTests(PolicySuite):
    """What shows only after hours, or with another clock than the machine's."""

    contract = "schedule_policy"

    def test_the_clock_may_start_anywhere(self) -> None:
        """Only what lies between two times counts, and the present is that of `ctx.clock` at the call."""
        first = self._order_by_time(_ORIGINS[0], early=False)
        # Where the machine's own clock stands in the middle of the queue, a policy that asks it cuts the queue in two.
        # In whole seconds, since rounding may change the order of those that are equally urgent.
        middle = float(round(time.monotonic()) - 2000)
        for origin in (*_ORIGINS, middle, middle + 5):
            for early in (False, True):
                assert self._order_by_time(origin, early) == first, (
                    f"the same queue is ordered otherwise where ctx.clock begins at {origin:g}"
                    f"{' and moves on after the policy was built' if early else ''}: take the time from ctx.clock() at "
                    "each call, and only to compare it with Req.timing"
                )

    def _order_by_time(self, origin: float, early: bool) -> list[list[int]]:
        """Return what a policy answers 4000 seconds after `origin`; an `early` one was built then."""
        draw, now = random.Random(8), [origin]
        cache = ReadOnlyCache([7] * 40, readable="cache_aware" in self.capabilities)
        ctx = SchedulePolicyContext(cache=cache, seed=1, clock=lambda: now[0])
        policy: SchedulePolicy | None = self.build(ctx) if early else None
        now[0] = origin + 4000.0
        policy = policy if policy is not None else self.build(ctx)

        def times() -> dict[str, Any]:
            # Whole seconds, which a float holds exactly.
            waited = draw.randrange(1, draw.choice((4000, 60)))
            return {"arrived": origin + 4000.0 - waited, "priority": draw.randrange(4)}

        waiting = [
            queued([1] * draw.randrange(1, 40), max_new_tokens=draw.randrange(1, 99), **times()) for _ in range(16)
        ]
        running = [active([1] * draw.randrange(1, 40), [1] * draw.randrange(9), **times()) for _ in range(8)]
        answers = [(waiting, policy.order(waiting, running)), (running, policy.victims(running))]
        answers += [(running, policy.preempt(req, running)) for req in waiting[:4]]
        places = [{req.rid: place for place, req in enumerate(reqs)} for reqs, _ in answers]
        return [[place[req.rid] for req in answer] for place, (_, answer) in zip(places, answers, strict=True)]

    def test_ctx_clock_is_the_only_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A simulation has its own time: a policy that looks at the machine's orders it at random."""
        asked: list[str] = []
        policy = self.policy()
        _watch_clocks(monkeypatch, type(policy), asked.append)
        waiting = [queued([1] * index, priority=index % 3, arrived=100.0 * index) for index in range(1, 6)]
        running = [active([1, 2], [3], arrived=50.0), active([1], [3, 4], arrived=60.0)]
        policy.order(waiting, running)
        policy.victims(running)
        policy.preempt(waiting[0], running)
        assert not asked, f"the policy asks time.{asked[0]}(): the only time is ctx.clock()"

    @capability("aging")
    def test_nobody_is_overtaken_for_ever(self) -> None:
        """The least urgent of all comes first at last, however urgent those are that arrive after it."""
        late = 1e7
        policy = self.policy(now=late)
        old = queued([1] * 50, max_new_tokens=100_000, priority=-3, arrived=1.0)
        newcomers = [queued([1], max_new_tokens=1, priority=3, arrived=late) for _ in range(3)]
        assert policy.order([*newcomers, old], [])[0] is old, "it has waited for months and is overtaken still"

    @capability("aging")
    def test_waiting_does_not_start_anew_after_a_retraction(self) -> None:
        late = 1e7
        policy = self.policy(now=late)
        old = queued([1] * 50, generated=[1, 2], max_new_tokens=100_000, priority=-3, arrived=1.0)
        old.timing.queued = late  # when it was retracted
        old.timing.first_scheduled = old.timing.first_token = old.timing.last_token = late - 1
        newcomers = [queued([1], max_new_tokens=1, priority=3, arrived=late - 5) for _ in range(3)]
        assert policy.order([old, *newcomers], [])[0] is old, (
            "what it has waited counts for nothing once it is retracted: timing.queued begins anew then, "
            "timing.waiting_since does not"
        )

    def test_requests_that_are_through_are_let_go(self) -> None:
        """A server is up for months. What belongs to one request stands in a ReqSlot, and goes with it."""
        cache = ReadOnlyCache([7] * 40, readable="cache_aware" in self.capabilities)
        policy = self.policy(cache)
        seen: list[weakref.ref[Req]] = []

        def rounds(count: int = _ROUNDS) -> None:
            for _ in range(count):
                self._round(policy, seen)

        rounds(10)
        grown = growth(rounds, _SLACK, policy, cache)
        if sum(ref() is not None for ref in seen) > _PER_ROUND:
            gc.collect()
        kept = sum(ref() is not None for ref in seen)
        assert kept <= _PER_ROUND, (
            f"{kept} of {len(seen)} requests are kept, of which at most {_PER_ROUND} were in the last queue: keep "
            "state in a ReqSlot, or drop it when a request is no longer among those that wait"
        )
        assert grown <= _SLACK, (
            f"the policy grows by {grown / _ROUNDS / _PER_ROUND:.0f} bytes for every request, and never shrinks: what "
            "it notes of one (by its rid, say) must go when the request goes"
        )

    def _round(self, policy: SchedulePolicy, seen: list[weakref.ref[Req]]) -> None:
        """Let some requests come, wait, run and finish."""
        waiting: list[Req] = [
            queued([7, index], priority=index % 3, kind=_Watched, principal=f"{index % 2}")
            for index in range(_PER_ROUND)
        ]
        seen += map(weakref.ref, waiting)
        for _ in range(2):
            policy.order(waiting, [])
        running, waiting = waiting[1:], waiting[:1]
        for req in running:
            req.move_to(ReqStatus.RUNNING)
        policy.order(waiting, running)
        policy.victims(running)
        policy.preempt(waiting[0], running)
        for req in (*running, *waiting):
            req.output.finish_reason = FinishReason(FinishType.LENGTH)
        policy.victims(running[:1])


def _watch_clocks(monkeypatch: pytest.MonkeyPatch, cls: type[Any], note: Callable[[str], None]) -> None:
    """Tell `note` which of the machine's clocks the policy's package asks, however it imported them."""
    packages = {one.__module__.rpartition(".")[0] or one.__module__ for one in cls.__mro__[:-1]}
    packages.discard(SchedulePolicy.__module__.rpartition(".")[0])
    modules = [module for name, module in list(sys.modules.items()) if _inside(name, packages)]
    for name in _OTHER_CLOCKS:
        real = getattr(time, name)

        def watched(name: str = name, real: Callable[[], Any] = real) -> Any:
            if _inside(sys._getframe(1).f_globals.get("__name__", ""), packages):
                note(name)
            return real()

        monkeypatch.setattr(time, name, watched)
        for module in modules:
            for attribute, value in list(vars(module).items()):
                if value is real:
                    monkeypatch.setattr(module, attribute, watched)


def _inside(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)
