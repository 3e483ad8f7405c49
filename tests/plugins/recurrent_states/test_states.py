"""States through the whole scheduler: each request gets what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from tests.core.pipeline.harness import IGNORE, prompts
from tests.plugins.recurrent_states.state_harness import Foresight, StateHarness, behind, oracle


def arrangement(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4])
    return {
        "page_size": page_size,
        "cache": rng.choice(["radix", "radix", "none", "block" if page_size == 4 else "radix"]),
        "tokens": rng.choice([160, 256, 2048]),
        "chunk": rng.choice([None, 4, 16]),
        "loop": rng.choice(["normal", "overlap"]),
        "mixed_chunk": rng.random() < 0.5,
        "prefill_first": rng.random() < 0.3,
        "policy": rng.choice(["fcfs", "priority"]),
        "count": rng.choice([5, 8, 12, 40]),
        "every": rng.choice([4, 8, 32]),
        "new_token_ratio": rng.choice([0.1, 0.7]),
        "speculator": rng.choice([None, None, Foresight(0.9), Foresight(0.3)]),
        "ahead": rng.choice([0, 2, 7]),
    }


@pytest.mark.parametrize("seed", [0, 3, 5, 12, *range(20, 28)])
def test_each_request_gets_what_it_would_get_alone(seed: int) -> None:
    play(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 1400, 100))
def test_many_more(first: int) -> None:
    for seed in range(first, first + 100):
        play(seed)


def play(seed: int) -> None:
    """Requests with shared prefixes, little memory, few slots, aborts, and passes that fail early or late."""
    rng, luck = random.Random(seed), random.Random(seed)
    harness = StateHarness(**arrangement(rng))
    failing, late = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.0, 0.1])
    model = harness.states

    def fails(work: Any) -> bool:
        if len(work.rows) > 1 and luck.random() < failing:
            model.spoil(work)
            return True
        return False

    model.fail_on, model.late = fails, lambda work: len(work.rows) > 1 and luck.random() < late
    asked = {f"r{at}": (prompt, rng.randint(1, 24)) for at, prompt in enumerate(prompts(24, seed=seed))}
    aborted = set()
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 3)):
            harness.step()
        if rng.random() < 0.1:
            harness.scheduler.receive([AbortRequest(rid=rid)])
            aborted.add(rid)
    harness.run()
    for rid, (prompt, n) in asked.items():
        if rid not in aborted:
            assert harness.tokens(rid) == oracle(prompt, n), rid


SHARED = [at % 199 + 3 for at in range(150)]


def own(number: int, length: int) -> list[int]:
    """Tokens that no other request has."""
    return [(number * 83 + at * 7) % 241 + 8 for at in range(length)]


def cached(harness: StateHarness, rid: str) -> int:
    """How many of a request's tokens were computed before."""
    return harness.outputs[rid][-1].cached_tokens


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 64])
def test_a_shared_prefix_is_computed_twice_at_most(page_size: int, chunk: int | None) -> None:
    harness = StateHarness(count=40, every=32, page_size=page_size, chunk=chunk)
    for number in range(5):
        harness.submit(f"r{number}", SHARED + own(number, 70), 4)
        harness.run()
    assert cached(harness, "r0") == 0
    assert [cached(harness, f"r{number}") >= len(SHARED) - page_size for number in (2, 3, 4)] == [True] * 3
    for number in range(5):
        assert harness.tokens(f"r{number}") == oracle(SHARED + own(number, 70), 4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_same_prompt_again_begins_at_its_last_page(page_size: int) -> None:
    harness = StateHarness(count=8, every=32, page_size=page_size)
    for rid in ("a", "b"):
        harness.submit(rid, SHARED, 4)
        harness.run()
    assert cached(harness, "b") == (len(SHARED) - 1) // page_size * page_size


def test_the_next_turn_begins_where_the_answer_before_has_left_a_snapshot() -> None:
    harness = StateHarness(count=8, every=16, page_size=4)
    harness.submit("a", SHARED, 50, **IGNORE)
    harness.run()
    said = harness.tokens("a")
    harness.submit("b", [*SHARED, *said, *own(1, 9)], 4)
    harness.run()
    assert cached(harness, "b") >= len(SHARED) + len(said) - 16 - 4


def test_what_is_retracted_goes_on_from_its_last_state() -> None:
    harness = StateHarness(count=8, every=1000, page_size=1)
    harness.submit("a", SHARED[:40], 30, **IGNORE)
    for _ in range(10):
        harness.step()
    (req,) = harness.scheduler.running.reqs
    done = req.kv.committed_len
    harness.scheduler.planner.retract(req)
    computed = len(harness.states.batches)
    harness.run()
    again = harness.states.batches[computed]
    assert int(again.prefix_lens[0]) == done, "more is computed again than the newest token"


def test_namespaces_do_not_share_states() -> None:
    harness = StateHarness(count=8, every=16)
    for rid, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        harness.submit(rid, SHARED, 4, namespace=salt)
        harness.run()
    assert cached(harness, "b") == 0
    assert cached(harness, "c") > 0


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


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_what_was_never_computed_becomes_no_snapshot(loop: str) -> None:
    """A prompt's pass fails for it alone: others with its prefix must not begin from what it was to leave."""
    harness = StateHarness(count=12, every=8, loop=loop)
    model = harness.states

    def fails(work: Any) -> bool:
        if 7 in work.input_ids[:1]:
            model.spoil(work)
            return True
        return False

    model.fail_on = fails
    harness.submit("bad", [7, *SHARED], 4)
    harness.run()
    assert harness.finish("bad")["status"] == 500
    assert not len(harness.stage.slots.snapshots)
    model.fail_on = lambda work: False
    for rid in ("a", "b"):
        harness.submit(rid, [7, *SHARED], 4)
        harness.run()
        assert harness.tokens(rid) == oracle([7, *SHARED], 4)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
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

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


@LOOPS
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_drafts_change_no_token(loop: str, rate: float) -> None:
    harness = StateHarness(count=60, every=8, loop=loop, speculator=Foresight(rate), page_size=4)
    for number in range(4):
        harness.submit(f"r{number}", SHARED[: 30 + number] + own(number, 9), 40, **IGNORE)
    harness.run()
    for number in range(4):
        expected = oracle(SHARED[: 30 + number] + own(number, 9), 40, ignore_eos=True)
        assert harness.tokens(f"r{number}") == expected
    counts = harness.drafts
    assert harness.states.verified == counts.drafted_tokens > 0
    assert (counts.accepted_tokens > 0) == (rate > 0)


def test_drafts_that_stand_save_steps() -> None:
    steps = []
    for speculator in (None, Foresight(1.0)):
        harness = StateHarness(count=40, every=1000, speculator=speculator)
        harness.submit("r", own(1, 9), 60, **IGNORE)
        harness.run()
        steps.append(len(harness.states.batches))
    assert steps[1] < steps[0] / 2


@LOOPS
def test_what_stands_of_drafts_becomes_a_snapshot(loop: str) -> None:
    """The next turn of a conversation begins behind the answer, whose states were all written by steps with drafts."""
    harness = StateHarness(count=40, every=16, page_size=4, loop=loop, speculator=Foresight(0.9))
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
    harness = StateHarness(count=60, every=4, page_size=4, loop=loop, speculator=Foresight(0.0))
    harness.submit("a", SHARED[:10], 40, **IGNORE)
    harness.run()
    kept = [*SHARED[:10], *harness.tokens("a")]
    states = {behind(0, kept[:length]) for length in range(len(kept) + 1)}
    snapshots = harness.stage.slots.snapshots.slots
    assert len(snapshots) > 2
    assert {int(harness.states.states[slot]) for slot in snapshots} <= states


@LOOPS
def test_drafts_leave_slots_for_others(loop: str) -> None:
    """Where slots are short a request that waits is admitted all the same, and drafts get what is left."""
    harness = StateHarness(count=8, every=1000, loop=loop, speculator=Foresight(0.9))
    harness.submit("a", own(1, 9), 60, **IGNORE)
    for _ in range(6):
        harness.step()
    assert harness.states.verified > 0
    harness.submit("b", own(2, 9), 60, **IGNORE)
    for _ in range(6):
        harness.step()
    assert len(harness.scheduler.running) == 2
    harness.run()
    for rid, number in (("a", 1), ("b", 2)):
        assert harness.tokens(rid) == oracle(own(number, 9), 60, ignore_eos=True)


def test_without_slots_to_spare_there_are_no_drafts() -> None:
    harness = StateHarness(count=4, every=1000, speculator=Foresight(0.9))
    harness.submit("a", own(1, 9), 30, **IGNORE)
    harness.run()
    assert harness.states.verified == 0
    assert harness.tokens("a") == oracle(own(1, 9), 30, ignore_eos=True)


def test_branches_are_an_error() -> None:
    """No speculator with branches is taken for such a model; a stage of another plugin may bring some all the same."""

    class Forked(Foresight):
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
