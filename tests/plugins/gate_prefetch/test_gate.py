"""How long requests wait for what storages have, and that nothing which goes wrong there holds one up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pegboard.conformance.admission_gate import AdmissionGateContract, ManualClock, gated_request
from pegboard.conformance.fakes import EmptyCache
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.plugins.gate_prefetch.gate import UNKNOWN_SPEED, PrefetchGate
from pegboard.plugins.gate_prefetch.options import PrefetchGateOptions

LENGTH = 4097
HAD = 1000
SPEED = 2000.0


class FakePrefetch:
    """One that the test drives. `broken` names what raises."""

    def __init__(self, key: PrefixKey) -> None:
        self.key = key
        self.state: dict[str, Any] = {"done": False, "tokens": min(HAD, len(key)), "wanted": None}
        self.broken = ""
        self.closed = 0

    def _said(self, name: str) -> Any:
        if self.broken == name:
            raise OSError(f"no {name}")
        return self.state[name]

    @property
    def done(self) -> bool:
        return bool(self._said("done"))

    @property
    def tokens(self) -> int:
        return int(self._said("tokens"))

    @property
    def wanted(self) -> int | None:
        wanted: int | None = self._said("wanted")
        return wanted

    def close(self) -> None:
        self.closed += 1
        if self.broken == "close":
            raise OSError("no close")


class FakeCache(EmptyCache):
    """Remembers what it was asked to prefetch; `error` is what it raises; `broken` and `done` are the prefetches'."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[FakePrefetch] = []
        self.error: Exception | None = None
        self.broken = ""
        self.done = False

    def prefetch(self, key: PrefixKey) -> FakePrefetch:
        if self.error is not None:
            raise self.error
        self.begun.append(FakePrefetch(key))
        self.begun[-1].broken = self.broken
        self.begun[-1].state["done"] = self.done
        return self.begun[-1]

    @property
    def closed(self) -> list[int]:
        return [one.closed for one in self.begun]


class TestPrefetchGate(AdmissionGateContract):
    provider = "prefetch"
    options = {"threshold": 5}
    params = ()

    @pytest.fixture
    def gate(self, clock: ManualClock) -> AdmissionGate:
        self.cache = FakeCache()
        built: AdmissionGate = self.build(AdmissionGateContext(clock, self.cache))
        return built

    def unconcerned_request(self) -> Req:
        return Req("gated-short-request", np.arange(4), SamplingParams(max_new_tokens=4))

    def blocked_request(self, gate: AdmissionGate) -> Req:
        return gated_request()

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        for prefetch in self.cache.begun:
            if prefetch.key.memo is req.memo:
                prefetch.state["done"] = True


class Rig:
    def __init__(self, speed: float = SPEED, **options: Any) -> None:
        self.clock, self.cache = ManualClock(), FakeCache()
        context = AdmissionGateContext(self.clock, self.cache, lambda: speed)
        self.gate = PrefetchGate(PrefetchGateOptions(**options), context)
        self.req = Req("r", np.arange(LENGTH), SamplingParams(max_new_tokens=4), namespace="salt:a")

    def enter(self) -> GateState:
        assert self.gate.concerns(self.req)
        return self.gate.enter(self.req).state

    @property
    def prefetch(self) -> FakePrefetch:
        return self.cache.begun[0]

    def verdict(self) -> Verdict:
        return self.gate.poll([self.req])[self.req.rid]

    def opens_after(self, most: float = 100.0, step: float = 0.01) -> float:
        """Seconds from now on until it opens; the prefetch is then closed."""
        began = self.clock.now
        while self.verdict().state is GateState.BLOCKED:
            assert self.cache.closed == [0]
            assert self.clock.now - began < most, "it does not open"
            self.clock.advance(step)
        assert self.cache.closed == [1]
        return round(self.clock.now - began, 6)


def test_the_prompt_that_a_cache_may_match_is_asked_for() -> None:
    rig = Rig()
    assert rig.enter() is GateState.BLOCKED
    key = rig.prefetch.key
    assert (len(key), key.namespace, key.memo is rig.req.memo) == (LENGTH - 1, "salt:a", True)


def test_short_prompts_do_not_wait() -> None:
    gate = Rig().gate
    short, long = (Req("r", np.arange(count), SamplingParams()) for count in (255, 256))
    assert (gate.concerns(short), gate.concerns(long)) == (False, True)


def test_progress_is_what_has_come() -> None:
    rig = Rig(policy="wait_complete")
    rig.enter()
    assert rig.verdict().progress is None
    rig.prefetch.state |= {"wanted": HAD + 2000, "tokens": HAD + 500}
    verdict = rig.verdict()
    assert verdict.progress == 0.25
    assert verdict.reason == "500 of 2000 tokens have come from storages"


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_what_is_there_already_holds_nothing_up(policy: str) -> None:
    rig = Rig(policy=policy)
    rig.cache.done = True
    assert rig.enter() is GateState.OPEN
    assert rig.cache.closed == [1]
    rig.gate.finished(rig.req)
    assert rig.cache.closed == [1]


def test_best_effort_goes_on_until_the_request_is_admitted() -> None:
    rig = Rig(policy="best_effort")
    assert rig.enter() is GateState.OPEN
    rig.gate.poll([])
    assert rig.cache.closed == [0]
    rig.req.move_to(ReqStatus.RUNNING)
    rig.gate.poll([])
    assert rig.cache.closed == [1]
    rig.gate.finished(rig.req)
    assert rig.cache.closed == [1]


def test_wait_complete_waits_as_long_as_something_comes() -> None:
    rig = Rig(policy="wait_complete", stall=5.0)
    rig.enter()
    rig.prefetch.state["wanted"] = HAD + 3000
    for _ in range(30):
        rig.clock.advance(4.0)
        rig.prefetch.state["tokens"] += 100
        assert rig.verdict().state is GateState.BLOCKED
    assert rig.opens_after() == pytest.approx(5.0, abs=0.011)


def test_wait_complete_ends_when_all_is_there() -> None:
    rig = Rig(policy="wait_complete")
    rig.enter()
    rig.clock.advance(3)
    rig.prefetch.state["done"] = True
    assert rig.opens_after() == 0


def test_auto_waits_no_longer_than_computing_would_take() -> None:
    rig = Rig()
    rig.enter()
    assert rig.opens_after() == pytest.approx((LENGTH - HAD) / SPEED, abs=0.011)


def test_auto_counts_only_what_is_to_come() -> None:
    rig = Rig()
    rig.enter()
    rig.clock.advance(0.2)
    rig.prefetch.state["wanted"] = HAD + 1000
    assert rig.opens_after() == pytest.approx(1000 / SPEED - 0.2, abs=0.011)


def test_auto_does_not_wait_for_nothing() -> None:
    rig = Rig()
    rig.enter()
    rig.prefetch.state["wanted"] = HAD
    assert rig.opens_after() == 0


def test_auto_reckons_with_some_speed_before_it_is_known() -> None:
    rig = Rig(speed=0.0)
    rig.enter()
    assert rig.opens_after() == pytest.approx((LENGTH - HAD) / UNKNOWN_SPEED, abs=0.011)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [({}, 2.0 + 0.1 * LENGTH / 1024), ({"base": 0.5, "per_1024": 0.0}, 0.5), ({"per_1024": 10.0, "max": 3.0}, 3.0)],
)
def test_a_limit_by_length(limit: dict[str, float], seconds: float) -> None:
    rig = Rig(limit=limit)
    rig.enter()
    rig.prefetch.state["wanted"] = HAD
    assert rig.opens_after() == pytest.approx(seconds, abs=0.011)


def test_nothing_that_stands_still_is_waited_for_for_ever() -> None:
    rig = Rig(speed=1.0)
    rig.enter()
    assert rig.opens_after() == pytest.approx(10.0, abs=0.011)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("end", ["cancel", "finished", "both", "again"])
def test_a_prefetch_is_closed_once(policy: str, end: str) -> None:
    rig = Rig(policy=policy)
    rig.enter()
    if end in ("cancel", "both"):
        rig.gate.cancel(rig.req)
    if end in ("finished", "both"):
        rig.gate.finished(rig.req)
    if end == "again":
        rig.enter()
        assert rig.cache.closed == [1, 0]
        rig.gate.cancel(rig.req)
    assert set(rig.cache.closed) == {1}
    rig.gate.cancel(rig.req)
    assert set(rig.cache.closed) == {1}


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("broken", ["tokens", "done", "wanted", "close", "prefetch"])
def test_whatever_the_cache_raises_opens_the_gate(policy: str, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(policy=policy)
    rig.cache.broken = broken
    rig.cache.error = OSError("no prefetch") if broken == "prefetch" else None
    state = rig.enter()
    if broken == "close":
        rig.prefetch.state["done"] = True
        if state is GateState.BLOCKED:
            state = rig.verdict().state
    assert state is GateState.OPEN
    rig.gate.finished(rig.req)
    assert rig.cache.closed == ([] if broken == "prefetch" else [1])
    assert f"no {broken}" in caplog.text


def test_what_breaks_while_a_request_waits_opens_the_gate() -> None:
    rig = Rig()
    assert rig.enter() is GateState.BLOCKED
    rig.prefetch.broken = "tokens"
    assert rig.opens_after() == 0


def test_each_request_has_its_own_time_in_the_scheduler() -> None:
    """A keeper that would end a wait after a while never does: this gate says so in its options."""
    rig = Rig(policy="wait_complete", stall=500.0)
    keeper = GateKeeper([("prefetch", rig.gate)], rig.clock)
    others = [Req(f"r{number}", np.arange(LENGTH), SamplingParams()) for number in range(3)]
    for req in others:
        assert keeper.arrive(req) is None
        rig.clock.advance(10)
    rig.clock.advance(400)
    rig.cache.begun[1].state["done"] = True
    news = keeper.poll()
    assert ([req.rid for req in news.ready], news.failed) == (["r1"], [])
    keeper.cancel(others[0])
    rig.clock.advance(200)
    news = keeper.poll()
    assert ([req.rid for req in news.ready], news.failed) == (["r2"], [])
    assert rig.cache.closed == [1, 1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "never"},
        {"limit": "soon"},
        {"limit": {"base": -1}},
        {"limit": {"per_page": 1}},
        {"limit": {"max": float("inf")}},
        {"threshold": 0},
        {"stall": 0},
        {"timeout": 3.0},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PrefetchGateOptions.model_validate(options)


def with_gate(cache: str) -> dict[str, Any]:
    return {"model": {"path": "x"}, "gates": [{"use": "prefetch"}], "prefix_cache": {"use": cache}}


def test_it_comes_with_a_cache_that_can_prefetch() -> None:
    found = compose((), data=with_gate("auto")).candidates["prefix_cache"]
    assert found
    assert all("prefetch" in one.provides for one in found)


@pytest.mark.parametrize("cache", ["radix", "none"])
def test_a_cache_that_cannot_prefetch_is_refused_with_what_to_do(cache: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose((), data=with_gate(cache))
    text = str(caught.value)
    assert "prefix_cache.prefetch" in text
    assert "hiradix" in text


def test_without_a_cache_there_is_nothing_to_wait_for() -> None:
    context = AdmissionGateContext(ManualClock())
    assert PrefetchGate.supports(PrefetchGateOptions(), context)
    assert PrefetchGate(PrefetchGateOptions(), context).enter(gated_request()).state is GateState.OPEN
