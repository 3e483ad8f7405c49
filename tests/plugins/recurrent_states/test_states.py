"""States through the whole scheduler: each request gets what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from tests.core.pipeline.group_games import LOOPS, SHARED, GroupGames, arrangement, cached, own
from tests.core.pipeline.group_models import hashes
from tests.core.pipeline.harness import IGNORE, Seer, oracle
from tests.plugins.recurrent_states.state_harness import StateHarness


class TestGames(GroupGames):
    ample = {"count": 60}

    def make(self, **more: Any) -> Any:
        return StateHarness(**more)

    def draw(self, rng: random.Random) -> Any:
        drafts: dict[str, Any] = {
            "speculator": rng.choice([None, Seer(0.9), Seer(0.3)]),
            "ahead": rng.choice([0, 2, 7]),
        }
        return StateHarness(**arrangement(rng), count=rng.choice([5, 8, 12, 40]), **drafts)


def test_requests_wait_for_slots_and_all_are_served() -> None:
    harness = StateHarness(count=5, every=16)
    for number in range(6):
        harness.submit(f"r{number}", own(number, 20), 8, **IGNORE)
    most = 0
    while not harness.scheduler.idle:
        harness.step()
        most = max(most, len(harness.scheduler.running))
    assert most == 2
    assert all(len(harness.tokens(f"r{number}")) == 8 for number in range(6))


@LOOPS
def test_a_decode_is_one_round(loop: str) -> None:
    harness = StateHarness(count=40, every=1000, loop=loop)
    for number in range(4):
        harness.submit(f"r{number}", own(number, 9), 12, **IGNORE)
    for _ in range(6):
        harness.step()
    harness.states.runs.clear()
    for _ in range(3):
        harness.step()
    assert set(harness.states.runs) == {4}, "a batch has several rounds, or runs are computed apart"
    harness.run()


# ---- tokens ahead ---------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_drafts_change_no_token(loop: str, rate: float) -> None:
    harness = StateHarness(count=60, every=8, loop=loop, speculator=Seer(rate), page_size=4)
    for number in range(4):
        harness.submit(f"r{number}", SHARED[: 30 + number] + own(number, 9), 40, **IGNORE)
    harness.run()
    for number in range(4):
        expected = oracle(SHARED[: 30 + number] + own(number, 9), 40, ignore_eos=True)
        assert harness.tokens(f"r{number}") == expected
    counts = harness.drafts
    assert counts.drafted_tokens > 0
    assert (counts.accepted_tokens > 0) == (rate > 0)


def test_drafts_that_stand_save_steps() -> None:
    steps = []
    for speculator in (None, Seer(1.0)):
        harness = StateHarness(count=40, every=1000, speculator=speculator)
        harness.submit("r", own(1, 9), 60, **IGNORE)
        harness.run()
        steps.append(len(harness.states.batches))
    assert steps[1] < steps[0] / 2


@LOOPS
def test_what_stands_of_drafts_becomes_a_snapshot(loop: str) -> None:
    """The next turn of a conversation begins behind the answer, whose states were all written by steps with drafts."""
    harness = StateHarness(count=40, every=16, page_size=4, loop=loop, speculator=Seer(0.9))
    harness.submit("a", SHARED, 90, **IGNORE)
    harness.run()
    said = harness.tokens("a")
    harness.submit("b", [*SHARED, *said, *own(1, 9)], 4)
    harness.run()
    assert cached(harness, "b") >= len(SHARED) + len(said) - 16 - 8 - 4
    assert harness.tokens("b") == oracle([*SHARED, *said, *own(1, 9)], 4)


@LOOPS
def test_what_was_rejected_becomes_no_snapshot(loop: str) -> None:
    """Of drafts that are all wrong, a prompt that begins as they would have gone on finds nothing."""
    harness = StateHarness(count=60, every=4, page_size=4, loop=loop, speculator=Seer(0.0))
    harness.submit("a", SHARED[:10], 40, **IGNORE)
    harness.run()
    kept = [*SHARED[:10], *harness.tokens("a")]
    states = set(hashes(kept))
    snapshots = harness.stage.slots.snapshots.slots
    assert len(snapshots) > 2
    assert {int(harness.states.states[slot]) for slot in snapshots} <= states


@LOOPS
def test_drafts_leave_slots_for_others(loop: str) -> None:
    """Where slots are short a request that waits is admitted all the same, and drafts get what is left."""
    harness = StateHarness(count=8, every=1000, loop=loop, speculator=Seer(0.9))
    harness.submit("a", own(1, 9), 60, **IGNORE)
    for _ in range(6):
        harness.step()
    assert harness.drafts.drafted_tokens > 0
    harness.submit("b", own(2, 9), 60, **IGNORE)
    for _ in range(6):
        harness.step()
    assert len(harness.scheduler.running) == 2
    harness.run()
    for rid, number in (("a", 1), ("b", 2)):
        assert harness.tokens(rid) == oracle(own(number, 9), 60, ignore_eos=True)


def test_without_slots_to_spare_there_are_no_drafts() -> None:
    harness = StateHarness(count=4, every=1000, speculator=Seer(0.9))
    harness.submit("a", own(1, 9), 30, **IGNORE)
    harness.run()
    assert harness.drafts.drafted_tokens == 0
    assert harness.tokens("a") == oracle(own(1, 9), 30, ignore_eos=True)


def test_branches_are_an_error() -> None:
    """No speculator with branches is taken for such a model; a stage of another plugin may bring some all the same."""

    class Forked(Seer):
        def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
            roots = np.array([row.tokens[-1] for row in rows], np.int64)
            counts = np.full(len(rows), 3, np.int64)
            tokens = np.stack([roots, roots * 0 + 9, roots * 0 + 11], 1).reshape(-1)
            return TokenTrees(counts, tokens, np.tile(np.array([-1, 0, 0], np.int64), len(rows)))

    harness = StateHarness(count=40, every=1000, speculator=Forked(1.0))
    harness.submit("a", own(1, 9), 6, **IGNORE)
    harness.run()
    assert harness.finish("a")["status"] == 500
    assert not harness.stage.slots.taken
