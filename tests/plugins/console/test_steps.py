"""What is noted of steps, and when nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.batch import ScheduleBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import ControlReply, ControlRequest
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.console import plugin
from pegboard.plugins.console.actions import LOOK, MOST_RUNS, POINTS, RUNS
from pegboard.plugins.console.hooks import Console
from pegboard.plugins.console.steps import KEPT, NOTED_FOR, Steps
from tests.core.pipeline.harness import Harness


def batch(at: float, *, extend: Sequence[int] = (1, 1), decoding: int = 2, **more: Any) -> ScheduleBatch:
    lens = np.array(extend, dtype=np.int64)
    mode = ForwardMode.DECODE if decoding == len(extend) else ForwardMode.EXTEND
    tokens = np.zeros(len(extend), dtype=np.int64)
    reqs: Any = [None] * len(extend)
    made = ScheduleBatch(0, mode, reqs, lens, lens, lens * 0, decoding, tokens=tokens, **more)
    made.planned_at, made.committed_at = at - 0.5, at
    return made


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_noted_before_anyone_asks_and_long_after() -> None:
    clock = Clock()
    steps = Steps(clock)
    steps.committed(batch(100.0))
    assert steps.since(0) == []
    steps.committed(batch(101.0))
    assert [row[0] for row in steps.since(0)] == [1]
    clock.now = 101.0
    steps.committed(batch(100.0 + NOTED_FOR + 0.1))
    assert [row[0] for row in steps.since(0)] == [1]
    steps.committed(batch(clock.now + NOTED_FOR))
    assert [row[0] for row in steps.since(1)] == [2]


def test_a_row_says_what_was_in_the_step() -> None:
    steps = Steps(Clock())
    steps.since(0)
    steps.committed(batch(101.0))
    steps.committed(batch(102.0, extend=[7, 5, 1], decoding=1))
    steps.committed(batch(103.0, extend=[3, 4], trees=object(), gained=np.array([2, 3])))
    assert [row[1:] for row in steps.since(0)] == [
        ("decode", 100.5, 101.0, 2, 2, 0, 0, 2),
        ("extend", 101.5, 102.0, 3, 1, 12, 0, 3),
        ("decode", 102.5, 103.0, 2, 2, 0, 5, 5),
    ]


def test_the_oldest_go() -> None:
    steps = Steps(Clock())
    steps.since(0)
    for _ in range(KEPT + 5):
        steps.committed(batch(101.0))
    rows = steps.since(0)
    assert (len(rows), rows[0][0], rows[-1][0]) == (KEPT, 6, KEPT + 5)


@pytest.fixture
def looked_at() -> tuple[Harness, Console]:
    """A scheduler in which the console has taken part since the start."""
    console = Console()
    harness = Harness(chunk=16, loop="overlap", hooks=StepHooks(batch_committed=(console.batch_committed,)))
    hooks = Hooks()
    hooks.add(console, plugin=plugin)
    hooks.call.engine_started(info=None, engine=SchedulerView(harness.scheduler, hooks))
    return harness, console


def control(harness: Harness, action: str, **args: Any) -> ControlReply:
    (reply,) = harness.scheduler.receive([ControlRequest(call_id=1, action=action, args=args)])
    assert isinstance(reply, ControlReply)
    return reply


def test_a_look_has_figures_and_the_steps_since_the_last_one(looked_at: tuple[Harness, Console]) -> None:
    harness, _ = looked_at
    first = control(harness, LOOK).payload
    assert first["steps"] == []
    assert first["stats"]["running_requests"] == 0
    harness.submit("a", list(range(10, 50)), 4, sampling={"ignore_eos": True})
    harness.run()
    found = control(harness, LOOK, since=0).payload
    rows = found["steps"]
    assert [row[6] for row in rows][:3] == [16, 16, 8]
    assert {row[1] for row in rows} == {"extend", "decode"}
    assert all(began <= ended for _, _, began, ended, *_ in rows)
    assert found["stats"]["finished"] == 1
    assert found["started"] == first["started"]
    assert control(harness, LOOK, since=rows[-1][0]).payload["steps"] == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found))["stats"] == found["stats"], "it travels as it is"


def test_a_look_with_a_number_that_is_none_is_refused(looked_at: tuple[Harness, Console]) -> None:
    reply = control(looked_at[0], LOOK, since="all")
    assert (reply.ok, reply.payload["param"]) == (False, "since")


def test_the_runs_of_the_cache(looked_at: tuple[Harness, Console]) -> None:
    harness, _ = looked_at
    for rid in ("a", "b"):
        harness.submit(rid, [7, *range(10, 30)], 2, sampling={"ignore_eos": True})
        harness.run()
    found = control(harness, RUNS).payload
    assert found["cached_tokens"] == sum(run["on_device"] for run in found["runs"]) > 0
    assert max(run["hits"] for run in found["runs"]) > 0
    assert len(found["runs"]) <= MOST_RUNS


def test_a_cache_that_cannot_be_described_costs_its_view_alone(
    looked_at: tuple[Harness, Console], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def describe(self: RadixCache, most: int) -> None:
        raise KeyError(most)

    harness, _ = looked_at
    monkeypatch.setattr(RadixCache, "describe", describe)
    assert control(harness, RUNS).payload["runs"] == []
    assert "cannot be described" in caplog.text


def test_who_takes_part_where(looked_at: tuple[Harness, Console]) -> None:
    points = {point["point"]: point for point in control(looked_at[0], POINTS).payload["points"]}
    assert [one["name"] for one in points["batch_committed"]["listeners"]] == [f"{Console.__module__}:Console"]
    assert [one["plugin"] for one in points["Stage.pack"]["listeners"]] == ["row_outputs"]
    assert points["Stage.pack"]["process"] == "scheduler"
