"""Any order of arrivals, steps, aborts and retractions: drafts lose no page and change no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import NO_ROW
from tests.core.pipeline.harness import Harness, Seer, oracle, prompts
from tests.core.pipeline.watched import RESERVE, WatchedModel

PROMPTS = prompts(12, seed=3, longest=30)


class Drafting(RuleBasedStateMachine):
    """A small pool, and what is in it."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        shape=st.sampled_from(["chain", "tree"]),
        rate=st.sampled_from([0.2, 0.8, 1.0]),
        loop=st.sampled_from(["normal", "overlap"]),
        run=st.sampled_from([1, 16]),
        mixed=st.booleans(),
        device=st.booleans(),
    )
    def build(self, page_size: int, shape: str, rate: float, loop: str, run: int, mixed: bool, device: bool) -> None:
        seer = Seer(rate, shape)
        self.harness = Harness(
            speculator=seer,
            model=WatchedModel if device else None,
            reserve=RESERVE if device else None,
            page_size=page_size,
            tokens=192,
            run=run,
            loop=loop,
            mixed_chunk=mixed,
            chunk=16,
            max_running_requests=5,
            estimate_max_new_tokens=1,
        )
        if isinstance(self.harness.model, WatchedModel):
            self.harness.model.tree = seer.tree_of
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()

    @rule(which=st.integers(0, len(PROMPTS) - 1), n=st.integers(1, 60))
    def submit(self, which: int, n: int) -> None:
        rid = f"r{len(self.asked)}"
        self.asked[rid] = PROMPTS[which], n
        self.harness.submit(rid, PROMPTS[which], n, sampling={"ignore_eos": n % 2 == 0}, stream=n % 3 == 0)

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.requests.alive)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        alive = sorted(self.harness.scheduler.requests.alive)
        rid = alive[pick % len(alive)]
        self.aborted.add(rid)
        self.harness.scheduler.receive([AbortRequest(rid=rid)])

    @precondition(
        lambda self: self.harness.scheduler.loop.in_flight is None and bool(self.harness.scheduler.running.reqs)
    )
    @rule(pick=st.integers(0, 99))
    def retract(self, pick: int) -> None:
        running = self.harness.scheduler.running
        self.harness.scheduler.planner.retract(running[pick % len(running)])

    @precondition(lambda self: self.harness.scheduler.loop.in_flight is None)
    @rule()
    def give_back(self) -> None:
        """What is ahead of the running requests goes back, whole pages of it, and no more."""
        running, memory = self.harness.scheduler.running, self.harness.memory
        memory.trim(running)
        assert not memory.trim(running)
        for req, allocated in zip(running.reqs, running.allocated.tolist(), strict=True):
            assert allocated == req.kv.allocated_len <= -(-req.seq_len // memory.page_size) * memory.page_size

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        if not hasattr(self, "harness"):
            return
        memory = self.harness.memory
        seated = [req for req in self.harness.scheduler.requests.alive.values() if req.kv.row != NO_ROW]
        own = [memory.rows.host[req.kv.row, req.kv.cache_len : req.kv.allocated_len] for req in seated]
        slots = np.concatenate([np.empty(0, np.int32), *own])
        assert len(np.unique(slots)) == len(slots) == memory.held_tokens, "a slot has two owners"
        assert memory.books_error() is None
        for req in seated:
            assert req.kv.committed_len <= req.seq_len
            assert req.kv.committed_len <= req.kv.allocated_len

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for rid, (prompt, n) in self.asked.items():
            said, expected = self.harness.tokens(rid), oracle(prompt, n, ignore_eos=n % 2 == 0)
            if self.harness.finish(rid)["type"] == "abort":
                assert rid in self.aborted
                assert said == expected[: len(said)]
            else:
                assert said == expected


@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.full)])
def test_any_order(examples: int) -> None:
    machine: Any = Drafting
    run_state_machine_as_test(machine, settings=properties(examples, 25))
