"""Plugins that raise, and forward passes that fail: the offender fails, the rest go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import Accepted, Rejected
from pegboard.core.interfaces.prefix_cache import InsertResult
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.pipeline.executor import LocalExecutor
from pegboard.core.pipeline.guards import MAX_FAILURES, GuardedHooks, GuardedPolicy
from pegboard.core.pipeline.memory import MemoryCorrupted
from pegboard.core.pipeline.recovery import MAX_SINGLE_FAILURES, DeviceFailed
from tests.core.pipeline.harness import Harness, oracle

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


def boom(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("boom")


# ---- hooks --------------------------------------------------------------------------------------------------------


@LOOPS
def test_hooks_that_raise_cost_nobody_a_token(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    hooks = StepHooks(
        batch_scheduled=(boom, lambda batch: seen.append(len(batch))),
        batch_committed=(boom,),
        requests_finished=(boom,),
        idle=(boom,),
    )
    harness = Harness(loop=loop, hooks=hooks)
    harness.submit("a", [1, 2, 3], 5)
    harness.run()
    assert harness.tokens("a") == oracle([1, 2, 3], 5)
    assert seen, "a hook after one that raises is called all the same"
    assert harness.scheduler.info()["plugin_failures"] >= 4  # type: ignore[operator]
    assert sum("batch_scheduled" in record.message for record in caplog.records) == 1, "logged once, not every step"


def test_a_hook_that_always_raises_is_off_in_the_end() -> None:
    calls: list[int] = []

    def bad(n: int) -> None:
        calls.append(n)
        boom()

    hooks = GuardedHooks("batch_scheduled", [bad])
    for n in range(3 * MAX_FAILURES):
        hooks(n)
    assert len(calls) == MAX_FAILURES


def test_a_hook_that_recovers_is_not_switched_off() -> None:
    calls: list[int] = []

    def moody(n: int) -> None:
        calls.append(n)
        if n % MAX_FAILURES:
            boom()

    hooks = GuardedHooks("batch_scheduled", [moody])
    for n in range(3 * MAX_FAILURES):
        hooks(n)
    assert len(calls) == 3 * MAX_FAILURES


# ---- policy -------------------------------------------------------------------------------------------------------


class Broken(SchedulePolicy):
    """Raises at every question."""

    preempts = True
    order = victims = preempt = stats = boom


class Careless(SchedulePolicy):
    """Names requests twice, forgets others, and invents victims."""

    def order(self, waiting: Sequence[Any], running: Sequence[Any]) -> list[Any]:
        return [one for one in waiting for _ in range(2)]

    def victims(self, running: Sequence[Any]) -> list[Any]:
        return []


@LOOPS
@pytest.mark.parametrize("policy", [Broken, Careless])
def test_a_policy_that_fails_costs_order_only(policy: type[SchedulePolicy], loop: str) -> None:
    harness = Harness(loop=loop, tokens=160, page_size=4, chunk=16, estimate_max_new_tokens=1)
    bad = policy(None, SchedulePolicyContext(harness.memory.cache))
    guarded = GuardedPolicy(bad)
    harness.scheduler.components.policy = bad
    harness.scheduler.planner.policy = guarded
    prompts = [[i, i + 1, i + 2] * 4 for i in range(12)]
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, 30)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle(prompt, 30) for i, prompt in enumerate(prompts))
    assert harness.scheduler.counters.retractions > 0
    assert (guarded.failures > 0) == (policy is Broken)
    assert harness.scheduler.info()["policy"] == {}


# ---- per-request code ---------------------------------------------------------------------------------------------


class Picky:
    """A logits processor that fails on one request's parameters, and refuses another's."""

    reads_output = False

    def wants(self, params: Any) -> bool:
        if "refuse" in params.extra:
            raise InvalidRequest("refuse: no", param="custom_params.picky.refuse", code="picky")
        if "acme" in params.extra:
            boom()
        return False


def test_a_processor_that_fails_on_a_request_fails_that_one() -> None:
    harness = Harness(processors=(Picky(),))
    bad = harness.submit("bad", [1, 2], 3, sampling={"extra": {"acme": 1}})
    good = harness.submit("good", [1, 2], 3)
    assert isinstance(bad, Rejected)
    assert (bad.status, "boom" in bad.message) == (500, True)
    assert isinstance(good, Accepted)
    harness.run()
    assert harness.tokens("good") == oracle([1, 2], 3)


def test_a_processor_may_refuse_a_request() -> None:
    harness = Harness(processors=(Picky(),))
    refused = harness.submit("bad", [1, 2], 3, sampling={"extra": {"refuse": 1}})
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.code, refused.param) == (400, "picky", "custom_params.picky.refuse")
    assert refused.message == "refuse: no"
    assert isinstance(harness.submit("bad", [1, 2], 3), Accepted), "nothing is kept of it"
    harness.run()


# ---- the cache ----------------------------------------------------------------------------------------------------


@LOOPS
def test_a_cache_that_cannot_insert_costs_reuse_only(loop: str) -> None:
    harness = Harness(loop=loop, page_size=4)
    harness.memory.cache.extend = boom  # type: ignore[method-assign]
    for i in range(4):
        harness.submit(f"r{i}", list(range(20)), 5)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle(list(range(20)), 5) for i in range(4))
    assert harness.memory.guarded.failures > 0


def test_a_cache_that_took_pages_and_then_raised_ends_the_process() -> None:
    harness = Harness()
    real = harness.memory.cache.extend

    def half_done(*args: Any, **kwargs: Any) -> InsertResult:
        real(*args, **kwargs)
        return boom()

    harness.memory.cache.extend = half_done  # type: ignore[method-assign]
    harness.submit("a", [1, 2, 3], 3)
    with pytest.raises(MemoryCorrupted, match="changed hands"):
        harness.run()


# ---- failing forward passes ---------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("mixed", [False, True])
def test_the_request_to_blame_fails_alone(loop: str, mixed: bool) -> None:
    harness = Harness(loop=loop, mixed_chunk=mixed, chunk=64)
    prompts = {f"r{i}": [i + 1] * (i + 3) for i in range(9)}
    for rid, prompt in prompts.items():
        harness.submit(rid, prompt, 6, sampling={"ignore_eos": True})
        if rid == "r4":
            harness.step()
    harness.model.fail_on = lambda work: bool((work.positions == 10).any() and (work.input_ids == 8).any())
    harness.submit("bad", [8] * 11, 5)
    harness.run()
    assert harness.finish("bad")["type"] == "abort"
    assert harness.finish("bad")["status"] == 500
    assert "out of luck" in harness.finish("bad")["message"]
    for rid, prompt in prompts.items():
        if prompt[0] != 8:
            assert harness.tokens(rid) == oracle(prompt, 6, ignore_eos=True), rid
    assert harness.scheduler.counters.failed_batches >= 1


@LOOPS
def test_step_hooks_do_not_run_again_for_the_halves(loop: str) -> None:
    scheduled: list[int] = []
    harness = Harness(loop=loop, hooks=StepHooks(batch_scheduled=(lambda batch: scheduled.append(batch.bid),)))
    for i in range(4):
        harness.submit(f"r{i}", [i, 2], 3, sampling={"ignore_eos": True})
    harness.model.fail_on = lambda work: len(work.rows) > 2
    harness.run()
    assert len(scheduled) == len(set(scheduled))
    assert all(harness.tokens(f"r{i}") == oracle([i, 2], 3, ignore_eos=True) for i in range(4))


@LOOPS
def test_when_everybody_fails_not_everybody_is_tried(loop: str) -> None:
    harness = Harness(loop=loop)
    for i in range(16):
        harness.submit(f"r{i}", [i, 2], 3)
    harness.model.fail_on = lambda work: True
    harness.run()
    assert all(harness.finish(f"r{i}")["type"] == "abort" for i in range(16))
    assert len(harness.model.batches) < 16 + MAX_SINGLE_FAILURES


def test_a_device_that_is_gone_ends_the_process() -> None:
    harness = Harness()
    harness.scheduler.components.executor = LocalExecutor(harness.model.launch, healthy=lambda: False)
    harness.model.fail_on = lambda work: True
    harness.submit("a", [1, 2], 3)
    with pytest.raises(DeviceFailed):
        harness.run()


class Wrong(SchedulePolicy):
    """Answers with what is not an answer."""

    preempts = True

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> Any:
        return self.answer(waiting)

    def victims(self, running: Sequence[Req]) -> Any:
        return self.answer(running)

    def preempt(self, req: Req, running: Sequence[Req]) -> Any:
        return self.answer(running)


def lazily(reqs: Any) -> Any:
    yield from reqs[:1]
    raise RuntimeError("later")


def emptied(reqs: Any) -> Any:
    reqs.clear()
    return reqs


@pytest.mark.parametrize(
    "answer",
    [lambda reqs: None, lazily, lambda reqs: [None, *reqs], lambda reqs: [*reqs, *reqs], lambda reqs: [], emptied],
    ids=["none", "lazy", "junk", "twice", "nobody", "emptied"],
)
def test_whatever_a_policy_answers_everybody_is_served(answer: Any) -> None:
    harness = Harness(tokens=120, max_running_requests=3, estimate_max_new_tokens=1)
    harness.scheduler.planner.policy = GuardedPolicy(Wrong(answer))
    for i in range(6):
        harness.submit(f"r{i}", [i, 1, 2], 30)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle([i, 1, 2], 30) for i in range(6))
