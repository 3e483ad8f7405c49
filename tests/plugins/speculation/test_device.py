"""Speculators that draft on the device: what they are told, and what their failures cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.messages import MAX_FAILURES, DraftWork
from tests.core.pipeline.harness import IGNORE, Harness, Seer, oracle, prompts
from tests.core.pipeline.watched import RESERVE, WatchedModel


def watched(seer: Seer | None = None, **more: Any) -> tuple[Harness, WatchedModel]:
    """A scheduler with the watched model."""
    seer = seer or Seer(0.7, "tree")
    harness = Harness(speculator=seer, model=WatchedModel, reserve=RESERVE, **more)
    assert isinstance(harness.model, WatchedModel)
    harness.model.tree = seer.tree_of
    return harness, harness.model


def answered(harness: Harness, count: int = 24, n: int = 12, *, to_the_end: bool = True) -> None:
    """Requests with common prefixes, one after the other: each answer is what it is alone."""
    for index, prompt in enumerate(prompts(count, seed=5)):
        harness.submit(str(index), prompt, n, **(IGNORE if to_the_end else {}))
        harness.step()
    harness.run()
    for index, prompt in enumerate(prompts(count, seed=5)):
        assert harness.tokens(str(index)) == oracle(prompt, n, ignore_eos=to_the_end)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk": 16, "page_size": 4},
        {"split_prefill_layers": 2},
        {"mixed_chunk": True, "chunk": 16},
        {"tokens": 256, "page_size": 4, "estimate_max_new_tokens": 1},
        {"max_running_requests": 24, "speculation": {"adaptive": False, "max_batch": 3}},
    ],
    ids=["plain", "chunks", "split", "mixed", "tight", "many"],
)
def test_states_and_entries_are_right(settings: dict[str, Any], loop: str) -> None:
    """WatchedModel checks each step, with cached prefixes computed again for their last state."""
    harness, model = watched(loop=loop, **settings)
    tight = "estimate_max_new_tokens" in settings
    answered(harness, n=80 if tight else 12, to_the_end=not tight)
    assert model.drafted > 3
    assert model.looked_back > 5
    assert bool(harness.scheduler.counters.retractions) == tight


def test_a_failed_pass_tells_nothing_wrong() -> None:
    """Halves of a failed batch are run again, with what they were told before."""
    harness, model = watched(chunk=16)
    passes = iter(range(10_000))
    model.fail_on = lambda work: len(work.rows) > 1 and next(passes) % 4 == 0
    answered(harness)
    assert model.looked_back > 5


def test_short_memory_gives_no_drafts() -> None:
    """Where slots for drafting are not to be had, tokens come one by one, and nothing is retracted for drafts."""
    harness, model = watched(tokens=64, page_size=1, run=1)
    harness.submit("a", list(range(50)), 13, **IGNORE)
    harness.run()
    assert harness.tokens("a") == oracle(list(range(50)), 13, ignore_eos=True)
    assert 0 < model.drafted < 6
    assert harness.scheduler.counters.retractions == 0


class Fails(WatchedModel):
    """Drafts are not to be had."""

    def draft(self, work: DraftWork) -> TokenTrees:
        super().draft(work)
        raise RuntimeError("out of luck")


def test_failures_end_drafts() -> None:
    """Ten in a row, and it is not asked any more. Answers are as ever."""
    harness = Harness(speculator=Seer(1.0), model=Fails, reserve=RESERVE)
    answered(harness, count=6)
    assert harness.speculation is not None
    assert isinstance(harness.model, Fails)
    assert not harness.speculation.on
    failures = harness.scheduler.components.culprits.counts["speculator", "Seer"]
    assert failures == MAX_FAILURES <= harness.model.drafted


def test_wrong_trees_are_not_used() -> None:
    """A tree that begins with another token."""
    harness, model = watched()
    model.tree = lambda row: TokenTrees(np.array([2]), np.array([row.tokens[-1] ^ 1, 3]), np.array([-1, 0]))
    answered(harness, count=3)
    assert harness.drafts.drafted_tokens == 0


class Failing(WatchedModel):
    """Has no memory for the changes of the table, now and then: a call fails before they are taken."""

    def draft(self, work: DraftWork) -> TokenTrees:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls in (2, 3):
            raise RuntimeError("no memory")
        return super().draft(work)


def test_a_failed_call_loses_no_changes_of_the_table() -> None:
    seer = Seer(0.7)
    harness = Harness(speculator=seer, model=Failing, reserve=RESERVE, loop="overlap", run=1)
    assert isinstance(harness.model, Failing)
    harness.model.tree = seer.tree_of
    for number in range(3):
        harness.submit(str(number), [5 + number, 9, 2, 44], 30, **IGNORE)
    harness.run()
    for number in range(3):
        assert harness.tokens(str(number)) == oracle([5 + number, 9, 2, 44], 30, ignore_eos=True)
    assert harness.model.calls > 3
