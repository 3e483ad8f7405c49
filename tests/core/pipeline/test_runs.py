"""While memory is plentiful running requests get some tokens of it at once: each one's slots are neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.core.pipeline.harness import Harness, oracle

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
        seen.append((held, held - sum(int(one) for one in harness.scheduler.running.seq_lens)))
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
