"""Failed passes with another step under way behind them: whoever is to blame goes, and nobody else goes around."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.step import StepLost
from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.lost import MAX_LOST_STEPS
from tests.core.pipeline.harness import IGNORE, Harness, oracle


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("company", [False, True])
def test_a_prompt_in_chunks_that_fails_is_not_tried_for_ever(loop: str, mixed: bool, company: bool) -> None:
    """Its next chunk is under way when the one before fails; both are its own, and it is alone to blame."""
    bad = 250
    harness = Harness(loop=loop, chunk=16, mixed_chunk=mixed)
    harness.model.fail_on = lambda work: bad in work.input_ids
    if company:
        harness.submit("other", [1, 2, 3], 20, sampling={"ignore_eos": True})
        harness.step()
    harness.submit("bad", [bad, *range(60)], 5)
    harness.submit("next", list(range(100, 140)), 5)
    harness.run(limit=100)
    assert harness.finish("bad")["status"] == 500
    assert harness.tokens("next") == oracle(list(range(100, 140)), 5)
    if company:
        assert harness.tokens("other") == oracle([1, 2, 3], 20, ignore_eos=True)
    assert harness.scheduler.counters.failed_batches == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_a_chunk_that_fails_once_costs_nobody_a_token(mixed: bool) -> None:
    """Also where the last chunk is under way behind it, so that its request counts as running already."""
    for failing in range(1, 8):
        harness = Harness(loop="overlap", chunk=16, mixed_chunk=mixed)
        failed: set[int] = set()

        def fails(work: object, failing: int = failing, failed: set[int] = failed) -> bool:
            bid: int = work.bid  # type: ignore[attr-defined]
            again = bid in failed
            if bid == failing:
                failed.add(bid)
            return bid == failing and not again

        harness.model.fail_on = fails
        prompts = {"a": list(range(40)), "b": list(range(50, 90)), "c": [5, 6, 7]}
        for rid, prompt in prompts.items():
            harness.submit(rid, prompt, 6, sampling={"ignore_eos": True})
        harness.run(limit=200)
        # A request that is alone in a batch that fails is to blame for it.
        ends = {rid: harness.finish(rid)["type"] for rid in prompts}
        assert list(ends.values()).count("abort") <= 1
        for rid, prompt in prompts.items():
            expected = oracle(prompt, 6, ignore_eos=True)
            assert harness.tokens(rid) == (expected if ends[rid] == "length" else expected[: len(harness.tokens(rid))])


def test_failed_batch_fails_its_requests_only() -> None:
    harness = Harness()
    harness.submit("bad", [100, 101], 5)
    harness.model.fail_on = lambda work: 100 in work.input_ids
    harness.run()
    assert harness.finish("bad")["type"] == "abort"
    assert "out of luck" in harness.finish("bad")["message"]
    assert harness.memory.cache.cached_tokens == 0, "KV of a failed pass must not be shared"
    harness.submit("good", [1, 2], 5)
    harness.run()
    assert harness.tokens("good") == oracle([1, 2], 5)


@pytest.mark.parametrize("fails", range(1, 12))
def test_a_launch_that_fails_loses_no_changes_of_the_table(fails: int) -> None:
    harness = Harness(loop="overlap")
    model, calls = harness.model, iter(range(1, 1000))

    def launch(work: Any) -> Done[BatchResult]:
        if next(calls) == fails:
            raise RuntimeError("out of memory before anything was done")
        return Done(model(work))

    harness.scheduler.components.executor._launch = launch  # type: ignore[attr-defined]
    for rid in "abcd":
        harness.submit(rid, [ord(rid), 1, 2], 12, **IGNORE)
    harness.run()
    assert all(harness.tokens(rid) == oracle([ord(rid), 1, 2], 12, ignore_eos=True) for rid in "abcd")


class Penalty:
    """Reads the output, so that a request's newest token has to be known before its next step."""

    reads_output = True

    def wants(self, params: Any) -> bool:
        return bool(params.presence_penalty)


def test_one_that_fails_alone_loses_no_changes_of_the_table() -> None:
    """B's row was told to name A's pages, and its own went to D, while the pass that failed was under way."""
    harness = Harness(loop="overlap", page_size=4, processors=[Penalty()], run=1, prefill_first=True)
    harness.model.fail_on = lambda work: 13 in work.seq_lens.tolist()
    prompt = list(range(20, 40))
    for rid in "AB":
        harness.submit(rid, prompt, 12, **IGNORE)
        harness.step()
    harness.submit("C", list(range(60, 73)), 12, sampling={"presence_penalty": 1.0, "ignore_eos": True})
    for _ in range(4):
        harness.step()
    harness.submit("D", list(range(100, 150)), 4, **IGNORE)
    harness.run()
    assert harness.finish("C")["status"] == 500
    assert harness.tokens("A") == harness.tokens("B") == oracle(prompt, 12, ignore_eos=True)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_request_whose_steps_are_lost_for_ever_is_given_up(loop: str, mixed: bool) -> None:
    """No request is to blame for a lost step, so it is planned again; not for ever, and those that decode go on."""
    bad = 250
    harness = Harness(loop=loop, chunk=16, mixed_chunk=mixed)
    lost: list[int] = []

    def loses(work: Any) -> bool:
        if bad not in work.input_ids:
            return False
        lost.append(work.bid)
        raise StepLost("nothing came")

    harness.submit("other", [1, 2, 3], 40, **IGNORE)
    for _ in range(3):
        harness.step()
    harness.model.fail_on = loses
    harness.submit("bad", [bad, 4, 5], 5)
    harness.run(limit=300)
    harness.submit("next", [6, 7, 8], 5, **IGNORE)
    harness.run()
    finish = harness.finish("bad")
    assert (finish["status"], finish["message"]) == (500, "20 steps were lost, one after the other: nothing came")
    assert len(lost) == MAX_LOST_STEPS
    assert harness.tokens("other") == oracle([1, 2, 3], 40, ignore_eos=True)
    assert harness.tokens("next") == oracle([6, 7, 8], 5, ignore_eos=True)
    assert harness.scheduler.counters.book_errors == 0


def test_a_step_that_is_lost_now_and_then_costs_no_request() -> None:
    harness = Harness(loop="overlap")
    passes = iter(range(1000))

    def loses(work: Any) -> bool:
        if next(passes) % 3 == 0:
            raise StepLost("not this time")
        return False

    harness.model.fail_on = loses
    harness.submit("a", [1, 2, 3], 60, **IGNORE)
    harness.submit("b", [4, 5], 60, **IGNORE)
    harness.run(limit=600)
    for rid, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        assert harness.tokens(rid) == oracle(prompt, 60, ignore_eos=True)


def test_decodes_that_are_lost_for_ever_are_given_up() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], 30, **IGNORE)
    harness.step()

    def loses(work: Any) -> bool:
        raise StepLost("the device is far away")

    harness.model.fail_on = loses
    harness.run(limit=100)
    assert "the device is far away" in harness.finish("a")["message"]
    assert harness.memory.idle_error() is None
