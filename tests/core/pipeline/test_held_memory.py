"""What finished requests keep for a gate (status HELD) is nobody else's: rows and pages are short, and come back."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.registry.registry import Registry
from tests.core.pipeline.harness import Harness, oracle

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def held(clock: Clock, **more: object) -> Harness:
    """A harness with a gate that holds for as long as a request asks for."""
    record = Registry.discover(()).get("admission_gate", "drill")
    assert record is not None
    gate = record.load()(record.options_model()(), AdmissionGateContext(clock))
    keeper = GateKeeper([("drill", gate)], clock)
    return Harness(parts={"gates": keeper, "clock": clock}, **more)  # type: ignore[arg-type]


def some_steps(harness: Harness, steps: int = 60) -> None:
    for _ in range(steps):
        harness.step()


@LOOPS
def test_rows_of_held_requests_are_taken(loop: str) -> None:
    clock = Clock()
    harness = held(clock, loop=loop, max_running_requests=2)
    for rid in ("a", "b"):
        harness.submit(rid, [1, 2, 3], 3, params={"drill": {"hold": 5.0}})
    some_steps(harness)
    assert harness.scheduler.info()["held_requests"] == 2
    harness.submit("c", [4, 5, 6], 3)
    some_steps(harness)
    assert "c" not in harness.outputs, "every row is taken"
    clock.now = 10.0
    harness.run()
    assert harness.tokens("c") == oracle([4, 5, 6], 3)


@LOOPS
def test_a_request_waits_for_held_memory_and_does_not_fail(loop: str) -> None:
    clock = Clock()
    harness = held(clock, loop=loop, tokens=64, cache="none", estimate_max_new_tokens=1)
    harness.submit("held", list(range(30)), 2, params={"drill": {"hold": 5.0}})
    some_steps(harness)
    harness.submit("long", list(range(100, 125)), 30, stream=True, sampling={"ignore_eos": False})
    expected = oracle(list(range(100, 125)), 30)
    assert len(expected) > 10, "it is to need more than the held request leaves"
    some_steps(harness)
    assert 0 < len(harness.tokens("long")) < len(expected)
    assert harness.outputs["long"][-1].finish_reason is None
    clock.now = 10.0
    harness.run()
    assert harness.tokens("long") == expected


@LOOPS
def test_an_abort_lets_go_of_held_memory(loop: str) -> None:
    clock = Clock()
    harness = held(clock, loop=loop)
    harness.submit("a", [1, 2, 3], 3, params={"drill": {"hold": 5.0}})
    some_steps(harness)
    assert harness.memory.idle_error() is not None
    harness.scheduler.receive([AbortRequest(rid="a")])
    harness.run()
    assert harness.finish("a")["type"] in {"length", "stop"}
