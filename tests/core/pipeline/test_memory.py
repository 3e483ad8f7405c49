"""Memory: runs of slots, memory that finished requests hold, and a cache that fails."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.registry.registry import Registry
from tests.core.pipeline.harness import IGNORE, Harness, oracle

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


PROMPTS = {rid: [place + 1, 7, 9] for place, rid in enumerate("abcd")}


def decode(harness: Harness, tokens: int, steps: int) -> None:
    for rid, prompt in PROMPTS.items():
        harness.submit(rid, prompt, tokens)
    for _ in range(steps):
        harness.step()


def jumps(harness: Harness, position: int) -> int:
    """How often, in all rows, the slots behind `position` are no neighbours."""
    found = 0
    for req in harness.scheduler.running.reqs:
        slots = harness.rows.host[req.kv.row, position : req.kv.committed_len]
        found += int((np.diff(slots) != 1).sum())
    return found


@LOOPS
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_slots_of_a_run_are_neighbours(loop: str, page_size: int) -> None:
    harness = Harness(loop=loop, page_size=page_size, run=16)
    decode(harness, 60, 40)
    assert len(harness.scheduler.running.reqs) == 4
    run = max(16, page_size)
    assert jumps(harness, 3) <= 4 * -(-40 // run)
    harness.run()
    for rid, prompt in PROMPTS.items():
        assert harness.tokens(rid) == oracle(prompt, 60)


def test_without_runs_they_are_scattered() -> None:
    harness = Harness(run=1)
    decode(harness, 60, 40)
    assert jumps(harness, 3) > 100


def test_runs_end_where_half_of_the_memory_is_taken() -> None:
    harness = Harness(tokens=256, run=16, cache="none")
    for rid, prompt in PROMPTS.items():
        harness.submit(rid, prompt, 50, sampling={"ignore_eos": True})
    seen = []
    while not harness.scheduler.idle:
        harness.step()
        held = harness.memory.held_tokens
        seen.append((held, held - sum(int(one) for one in harness.scheduler.running.known_lens)))
    assert any(unused > 16 for _, unused in seen), "plentiful: a run for each of them"
    assert max(held for held, _ in seen) > 190
    assert all(unused <= 4 for held, unused in seen if held > 128), "short: what each of them needs"
    assert [len(harness.tokens(rid)) for rid in PROMPTS] == [50] * 4


@LOOPS
def test_a_run_ends_at_the_end_of_a_row(loop: str) -> None:
    harness = Harness(loop=loop, tokens=4096, max_context_len=40, run=16)
    for rid, prompt in PROMPTS.items():
        harness.submit(rid, prompt, 37)
    harness.run()
    for rid, prompt in PROMPTS.items():
        assert harness.tokens(rid) == oracle(prompt, 37)


@pytest.mark.parametrize("seed", range(6))
def test_runs_and_short_memory_give_the_same_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 30)), int(rng.integers(1, 50))) for _ in range(24)]
    answers = []
    for run, tokens in itertools.product((1, 16), (96, 4096)):
        harness = Harness(tokens=tokens, run=run)
        for place, (length, n) in enumerate(sizes):
            harness.submit(str(place), [place + 1] * length, n)
        harness.run()
        answers.append([harness.tokens(str(place)) for place in range(len(sizes))])
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert answers[0] == [oracle([place + 1] * length, n) for place, (length, n) in enumerate(sizes)]


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


@pytest.mark.parametrize("method", ["match", "lock", "unlock", "evict"])
def test_a_cache_that_raises_once_costs_reuse_only(method: str) -> None:
    harness = Harness(tokens=128)
    real, calls = getattr(harness.memory.cache, method), iter(range(1, 10**6))

    def sometimes(*args: Any) -> Any:
        # After the work is done, where doing it twice would be another mistake.
        if next(calls) == 3 and method != "unlock":
            raise RuntimeError(method)
        return real(*args)

    setattr(harness.memory.cache, method, sometimes)
    for i in range(6):
        harness.submit(f"r{i}", [i] * 20, 20, **IGNORE)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle([i] * 20, 20, ignore_eos=True) for i in range(6))
