"""Control actions of operators: pausing in every state that a scheduler can be in, logging, the collector."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from pegboard.core.config.compose import compose
from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest, Accepted, ControlReply, ControlRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.operator_controls.controls import OperatorControls
from tests.core.pipeline.harness import Harness, oracle

SETTINGS: list[dict[str, Any]] = [
    {"loop": "normal"},
    {"loop": "overlap"},
    {"loop": "overlap", "split_prefill_layers": 2},
    {"loop": "normal", "split_prefill_layers": 2},
    {"loop": "overlap", "mixed_chunk": True},
]
PROMPTS = {"a": [3, 1, 4], "b": list(range(10, 40)), "c": list(range(40, 75))}


def operated(**settings: Any) -> Harness:
    harness = Harness(chunk=16, **settings)
    started(harness, OperatorControls(NoOptions()))
    return harness


def started(harness: Harness, controls: OperatorControls) -> None:
    hooks = Hooks()
    hooks.add(controls)
    hooks.call.engine_started(info=None, engine=SchedulerView(harness.scheduler, hooks))


def control(harness: Harness, action: str, **args: Any) -> dict[str, Any]:
    (reply,) = harness.scheduler.receive([ControlRequest(call_id=1, action=action, args=args)])
    assert isinstance(reply, ControlReply)
    assert reply.ok, reply.payload
    return reply.payload


def begun(harness: Harness, steps: int) -> None:
    for rid, prompt in PROMPTS.items():
        harness.submit(rid, prompt, 20, sampling={"ignore_eos": True})
        harness.step()
    for _ in range(steps):
        harness.step()


def rest(harness: Harness) -> None:
    """Take what was under way when the pause came; then steps do nothing."""
    for _ in range(2):
        harness.step()
    assert harness.scheduler.resting or harness.scheduler.idle
    computed = len(harness.model.batches)
    for _ in range(5):
        assert harness.step() == []
    assert len(harness.model.batches) == computed


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("steps", range(0, 9, 2))
def test_requests_go_on_as_if_nothing_had_been(settings: dict[str, Any], mode: str, steps: int) -> None:
    harness = operated(**settings)
    begun(harness, steps)
    control(harness, "pause_generation", mode=mode)
    rest(harness)
    scheduler = harness.scheduler
    assert scheduler.info()["paused"] is True
    if mode == "retract":
        assert not scheduler.running
        assert scheduler.planner.chunked is None
        assert harness.memory.held_tokens == 0
        started = [req.rid for req in scheduler.waiting if req.status is ReqStatus.RETRACTED]
        assert started == list(PROMPTS)[: len(started)], "they come back in the order in which they ran"
    assert isinstance(harness.submit("late", [9, 9], 5, sampling={"ignore_eos": True}), Accepted)
    rest(harness)
    assert control(harness, "continue_generation") == {}
    harness.run()
    assert scheduler.info()["paused"] is False
    for rid, prompt in PROMPTS.items():
        assert harness.tokens(rid) == oracle(prompt, 20, ignore_eos=True)
    assert harness.tokens("late") == oracle([9, 9], 5, ignore_eos=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("args", [{}, {"mode": "abort"}, {"mode": None}])
def test_all_requests_end_unless_said_otherwise(settings: dict[str, Any], args: dict[str, Any]) -> None:
    harness = operated(**settings)
    begun(harness, 2)
    control(harness, "pause_generation", **args)
    rest(harness)
    assert {harness.finish(rid)["type"] for rid in PROMPTS} == {"abort"}
    assert harness.scheduler.idle, "the process can sleep until somebody says something"
    harness.submit("late", [9, 9], 5, sampling={"ignore_eos": True})
    rest(harness)
    control(harness, "continue_generation")
    harness.run()
    assert harness.tokens("late") == oracle([9, 9], 5, ignore_eos=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_aborts_work_while_paused(settings: dict[str, Any]) -> None:
    harness = operated(**settings)
    begun(harness, 2)
    control(harness, "pause_generation", mode="in_place")
    harness.scheduler.receive([AbortRequest(rid="b")])
    harness.step()
    assert harness.finish("b")["type"] == "abort"
    rest(harness)
    control(harness, "continue_generation")
    harness.run()
    for rid in ("a", "c"):
        assert harness.tokens(rid) == oracle(PROMPTS[rid], 20, ignore_eos=True)


def test_pausing_twice_and_going_on_twice() -> None:
    harness = operated()
    begun(harness, 3)
    control(harness, "pause_generation", mode="in_place")
    control(harness, "pause_generation", mode="retract")
    assert not harness.scheduler.running
    control(harness, "continue_generation")
    control(harness, "continue_generation")
    harness.run()
    assert harness.tokens("a") == oracle(PROMPTS["a"], 20, ignore_eos=True)


def test_who_has_paused_goes_on() -> None:
    """Steps start when nobody pauses any more."""
    harness = operated()
    begun(harness, 3)
    view = SchedulerView(harness.scheduler, Hooks())
    view.pause("retract", "acme")
    control(harness, "pause_generation", mode="in_place")
    assert not view.resume("others")
    control(harness, "continue_generation")
    assert harness.scheduler.info()["paused"] is True
    rest(harness)
    assert view.resume("acme")
    harness.run()
    assert harness.tokens("a") == oracle(PROMPTS["a"], 20, ignore_eos=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_under_way_is_settled(settings: dict[str, Any]) -> None:
    harness = operated(**settings)
    begun(harness, 3)
    view = SchedulerView(harness.scheduler, Hooks())
    view.pause("in_place", "acme")
    view.settle()
    assert harness.scheduler.loop.in_flight is None
    assert not harness.scheduler.planner.under_way
    view.drop_prefixes()
    assert harness.memory.cache.evictable_tokens == 0
    view.resume("acme")
    harness.run()
    for rid, prompt in PROMPTS.items():
        assert harness.tokens(rid) == oracle(prompt, 20, ignore_eos=True)
    assert harness.memory.cache.cached_tokens > 0
    view.drop_prefixes()
    assert harness.memory.cache.cached_tokens == 0


@pytest.mark.parametrize("mode", ["sleep", 3, ["abort"]])
def test_unknown_modes_are_refused_and_nothing_is_paused(mode: object) -> None:
    harness = operated()
    (reply,) = harness.scheduler.receive([ControlRequest(call_id=1, action="pause_generation", args={"mode": mode})])
    assert isinstance(reply, ControlReply)
    assert (reply.ok, reply.payload["param"], reply.payload["status"]) == (False, "mode", 400)
    assert not harness.scheduler.paused


# ---- logging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def root_level() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


@pytest.mark.usefixtures("root_level")
def test_what_is_logged_changes_at_run_time(caplog: pytest.LogCaptureFixture) -> None:
    operation = OperatorControls(NoOptions())
    harness = Harness(hooks=StepHooks(requests_finished=(operation.requests_finished,)))
    started(harness, operation)

    def lines(rid: str) -> list[str]:
        harness.submit(rid, [1, 2], 2)
        harness.run()
        return [record.rid for record in caplog.records if getattr(record, "event", "") == "request"]  # type: ignore[attr-defined]

    assert operation.configure_logging({"log_level": "warning"}) == {"log_level": "warning", "log_requests": False}
    assert logging.getLogger().level == logging.WARNING
    assert operation.configure_logging({"log_level": "info", "log_requests": None})["log_level"] == "info"
    assert lines("silent") == []
    assert operation.configure_logging({"log_requests": True}) == {"log_level": "info", "log_requests": True}
    assert lines("told") == ["told"]
    assert operation.configure_logging({})["log_requests"] is True
    operation.configure_logging({"log_requests": False})
    assert lines("silent again") == ["told"]


def test_the_config_switches_the_log_of_requests() -> None:
    resolved = compose(data={"model": {"path": "x"}, "log_requests": True}, env={})
    [controls] = [
        made
        for _, made in Hooks.load(resolved.registry, resolved.plugin_options).built
        if isinstance(made, OperatorControls)
    ]
    assert controls.configure_logging({})["log_requests"] is True


@pytest.mark.usefixtures("root_level")
@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"log_level": "loud"}, "log_level"),
        ({"log_level": 10}, "log_level"),
        ({"log_level": "debug", "log_requests": "yes"}, "log_requests"),
    ],
)
def test_bad_settings_change_nothing(args: dict[str, Any], param: str) -> None:
    operation = OperatorControls(NoOptions())
    before = logging.getLogger().level
    with pytest.raises(InvalidRequest) as caught:
        operation.configure_logging(args)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert logging.getLogger().level == before


def test_the_collector_leaves_alone_what_was_there() -> None:
    operation = OperatorControls(NoOptions())
    try:
        gc.unfreeze()
        said = operation.freeze_gc({})["objects"]
        # What other threads let go of meanwhile is not there any more.
        assert 0.9 * cast(int, said) < gc.get_freeze_count() <= cast(int, said)
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
