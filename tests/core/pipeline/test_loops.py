"""The overlap loop plans a step before it knows the one before. The tokens are the same, and nobody reads too early."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.pipeline.flags import HISTORY
from pegboard.core.pipeline.points import encoded
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from tests.core.pipeline.harness import EOS, Harness, oracle, prompts
from tests.core.pipeline.test_constraints import Counting


def test_a_step_is_launched_before_the_one_before_is_settled() -> None:
    harness = Harness(loop="overlap")
    harness.submit("a", [1, 2, 3], 6, sampling={"ignore_eos": True})
    harness.step()
    assert harness.scheduler.loop.in_flight is not None
    assert "a" not in harness.outputs
    (req,) = harness.scheduler.running
    assert (req.output_len, harness.scheduler.running.known_lens.tolist()) == (0, [4])
    harness.run()
    # Every decode took its input from the worker: the host had not seen it.
    decodes = [work for work in harness.model.batches if work.forward_mode is ForwardMode.DECODE]
    assert len(decodes) == 5
    assert all(work.future_indices is not None and work.input_ids.tolist() == [-1] for work in decodes)
    assert harness.tokens("a") == oracle([1, 2, 3], 6, ignore_eos=True)


def test_lanes_compute_for_different_requests_at_once() -> None:
    """Half of the requests each, none of which waits for a token of the step under way."""
    harness = Harness(loop="overlap", lanes=2)
    prompts = {name: [number, 2, 3] for number, name in enumerate("abcde")}
    for name, prompt in prompts.items():
        harness.submit(name, prompt, 12, sampling={"ignore_eos": True})
    harness.run()
    decodes = [work for work in harness.model.batches if work.forward_mode is ForwardMode.DECODE]
    assert all(work.future_indices is None for work in decodes)
    steady = [set(work.rows.tolist()) for work in decodes[2:-2]]
    assert {len(rows) for rows in steady} == {2, 3}
    assert all(not one & other for one, other in itertools.pairwise(steady))
    assert all(one == other for one, other in zip(steady, steady[2:], strict=False)), "a request keeps its lane"
    for name, prompt in prompts.items():
        assert harness.tokens(name) == oracle(prompt, 12, ignore_eos=True)


def test_lanes_overlap_where_tokens_have_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is in two steps that are under way, so all of its tokens are known when its next step is planned: also
    those that a constraint forces, and those of a request that is parked meanwhile.
    """
    harness = Harness(loop="overlap", lanes=2, joining=[Counting(late=1, ahead=2)])
    asked = {name: [number, 2, 3] for number, name in enumerate("abcde")}
    for name, prompt in asked.items():
        harness.submit(name, prompt, 40, sampling={"ignore_eos": True})
    for number in range(2):
        harness.submit(f"bound{number}", [130, 28], 40, features={"counting": encoded(True)})
    planner, behind = harness.scheduler.planner, list[bool]()
    plan = planner.plan

    def noted(in_flight: Any) -> Any:
        if planner.running.any(HISTORY) and in_flight is not None:
            behind.append((step := plan(in_flight)) is not None)
            return step
        return plan(in_flight)

    monkeypatch.setattr(planner, "plan", noted)
    harness.run()
    assert len(behind) > 20
    assert sum(behind) > 0.8 * len(behind), "steps wait for the results of those before them"
    for name, prompt in asked.items():
        assert harness.tokens(name) == oracle(prompt, 40, ignore_eos=True)
    for number in range(2):
        assert harness.tokens(f"bound{number}") == list(range(130, 158))


def test_lanes_take_turns_while_a_prompt_is_computed() -> None:
    """Also where a chunk of the prompt runs between two decodes, so that none is under way when one is planned."""
    harness = Harness(loop="overlap", lanes=2, chunk=16, max_context_len=2048)
    for name in "abcd":
        harness.submit(name, [ord(name), 2, 3], 200, stream=True, sampling={"ignore_eos": True})
    for _ in range(8):
        harness.step()
    harness.submit("long", [number % 250 for number in range(1500)], 1)
    before = {name: len(harness.tokens(name)) for name in "abcd"}
    for _ in range(60):
        harness.step()
    gained = [len(harness.tokens(name)) - before[name] for name in "abcd"]
    assert harness.scheduler.planner.chunked is not None, "the prompt is still under way"
    assert min(gained) >= 10
    assert max(gained) - min(gained) <= 2


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_lanes_without_others_to_take_turns_with(loop: str) -> None:
    """A request alone is in every step; without steps that overlap all requests are."""
    harness = Harness(loop=loop, lanes=2)
    for name in "a" if loop == "overlap" else "abc":
        harness.submit(name, [1, 2, 3], 6, sampling={"ignore_eos": True})
    harness.run()
    assert [work.forward_mode for work in harness.model.batches[1:]] == [ForwardMode.DECODE] * 5
    assert harness.tokens("a") == oracle([1, 2, 3], 6, ignore_eos=True)


def test_lanes_share_little_memory() -> None:
    """Where requests have to be retracted, the step under way is settled first."""
    harness = Harness(loop="overlap", lanes=2, tokens=160, mixed_chunk=True, chunk=8, estimate_max_new_tokens=1)
    asked = prompts(16, seed=1)
    for number, prompt in enumerate(asked):
        harness.submit(f"r{number}", prompt, 30)
    harness.run()
    assert harness.scheduler.counters.retractions > 0
    for number, prompt in enumerate(asked):
        assert harness.tokens(f"r{number}") == oracle(prompt, 30)


def test_the_normal_loop_leaves_nothing_to_the_worker() -> None:
    harness = Harness(loop="normal")
    harness.submit("a", [1, 2, 3], 6, sampling={"ignore_eos": True})
    harness.run()
    assert all(work.future_indices is None and (work.input_ids >= 0).all() for work in harness.model.batches)


def ending_early() -> tuple[list[int], int]:
    """A prompt whose answer ends by itself after some tokens, and how many those are."""
    for first in range(300):
        answer = oracle([first, 5], 20)
        if answer[-1] == EOS and 2 < len(answer) < 20:
            return [first, 5], len(answer)
    raise AssertionError("the fake model never ends")


def test_the_step_too_many_of_a_request_that_ended_is_dropped() -> None:
    prompt, length = ending_early()
    harness = Harness(loop="overlap")
    harness.submit("a", prompt, 20, stream=True)
    harness.submit("b", [9, 9, 9], 20, stream=True, sampling={"ignore_eos": True})
    harness.run()
    assert harness.tokens("a") == oracle(prompt, 20)
    assert harness.tokens("b") == oracle([9, 9, 9], 20, ignore_eos=True)
    both = [work for work in harness.model.batches if len(work.rows) == 2]
    assert len(both) == length + 1, "one step too many, and no more"
    assert harness.scheduler.counters.generated_tokens == length + 20


def test_a_request_at_its_length_is_in_no_step_too_many() -> None:
    harness = Harness(loop="overlap")
    harness.submit("a", [1, 2], 4, sampling={"ignore_eos": True})
    harness.run()
    assert len(harness.model.batches) == 4


@pytest.mark.parametrize("again", [False, True])
def test_memory_of_a_request_aborted_in_flight_is_free_at_once(again: bool) -> None:
    harness = Harness(loop="overlap", page_size=4, tokens=80)
    harness.submit("a", list(range(20)), 20, sampling={"ignore_eos": True})
    harness.submit("b", [3, 1], 20, sampling={"ignore_eos": True})
    for _ in range(3):
        harness.step()
    (a, _) = harness.scheduler.running
    harness.scheduler.receive([AbortRequest(rid="a")])
    assert a.kv.row == -1
    if again:
        # Its pages go to somebody else while the step that still writes to them is under way.
        harness.submit("c", list(range(40, 75)), 8, sampling={"ignore_eos": True})
    harness.run()
    assert harness.tokens("b") == oracle([3, 1], 20, ignore_eos=True)
    if again:
        assert harness.tokens("c") == oracle(list(range(40, 75)), 8, ignore_eos=True)


def test_planning_goes_on_while_the_device_computes() -> None:
    """The forward pass is held until the scheduler has planned the next step: with one thread it would hang."""
    harness = Harness(loop="overlap")
    planned = threading.Semaphore(0)
    run, build = harness.model.launch, harness.scheduler.components.builder.decode

    def held(work: Any) -> Any:
        if work.forward_mode is ForwardMode.EXTEND:
            assert planned.acquire(timeout=30), "the next step was not planned while this one was under way"
        return run(work)

    def noted(*args: Any) -> Any:
        planned.release()
        return build(*args)

    harness.scheduler.components.executor._launch = held  # type: ignore[attr-defined]
    harness.scheduler.components.builder.decode = noted  # type: ignore[assignment, method-assign]
    harness.submit("a", [1, 2, 3], 4, sampling={"ignore_eos": True})
    harness.run()
    assert harness.tokens("a") == oracle([1, 2, 3], 4, ignore_eos=True)


class Reader:
    """A logits processor that wants every request and reads, or only counts, what it has generated."""

    def __init__(self, reads_output: bool) -> None:
        self.reads_output = reads_output
        self.seen: list[tuple[int, int]] = []

    def wants(self, params: Any) -> bool:
        return True


@pytest.mark.parametrize("reads", [True, False])
def test_a_processor_that_reads_the_output_finds_all_of_it(reads: bool) -> None:
    processor = Reader(reads)
    harness = Harness(loop="overlap", processors=(processor,))
    seen: list[tuple[int, int]] = []
    run = harness.model.launch

    def watched(work: Any) -> Any:
        seen.extend((len(row.output_ids), row.generated) for row in work.sampling.rows)
        return run(work)

    harness.scheduler.components.executor._launch = watched  # type: ignore[attr-defined]
    harness.submit("a", [1, 2, 3], 5, sampling={"ignore_eos": True})
    harness.run()
    assert [generated for _, generated in seen] == [0, 1, 2, 3, 4]
    known = [known for known, _ in seen]
    assert known == [0, 1, 2, 3, 4] if reads else known[1] == 0


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_layers_of_a_prefill_make_way_for_decodes(loop: str) -> None:
    harness = Harness(loop=loop, split_prefill_layers=2)
    harness.submit("a", [1, 2, 3], 20, sampling={"ignore_eos": True})
    for _ in range(4):
        harness.step()
    before = len(harness.model.batches)
    harness.submit("b", list(range(30)), 4, sampling={"ignore_eos": True})
    harness.run()
    # Six layers in the harness: three parts, and a decode after each of the first two.
    assert [work.forward_mode.value for work in harness.model.batches[before : before + 6]] in (
        ["split_prefill", "decode"] * 3,
        ["decode", *["split_prefill", "decode"] * 3][:6],
    )
    parts = [work.part for work in harness.model.batches if work.part is not None]
    assert [(part.first, part.last) for part in parts] == [(True, False), (False, False), (False, True)]
    assert harness.tokens("a") == oracle([1, 2, 3], 20, ignore_eos=True)
    assert harness.tokens("b") == oracle(list(range(30)), 4, ignore_eos=True)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_slots_of_a_request_aborted_between_two_parts_stay_its_own_until_the_last(loop: str) -> None:
    harness = Harness(loop=loop, split_prefill_layers=1, page_size=1, tokens=64)
    harness.submit("a", [1, 2, 3], 30, sampling={"ignore_eos": True})
    for _ in range(3):
        harness.step()
    harness.submit("b", list(range(25)), 4)
    while not harness.scheduler.planner.under_way:
        harness.step()
    held = harness.memory.held_tokens
    harness.scheduler.receive([AbortRequest(rid="b")])
    assert harness.memory.held_tokens == held
    harness.step()
    assert harness.finish("b")["type"] == "abort", "the client hears of it at once"
    harness.run()
    assert harness.tokens("a") == oracle([1, 2, 3], 30, ignore_eos=True)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_part_that_fails_has_the_whole_prefill_computed_again(loop: str, fails: int) -> None:
    harness = Harness(loop=loop, split_prefill_layers=2)
    harness.submit("a", [1, 2, 3], 20, sampling={"ignore_eos": True})
    for _ in range(4):
        harness.step()
    parts = iter(range(100))
    harness.model.fail_on = lambda work: work.part is not None and next(parts) == fails
    harness.submit("b", list(range(30)), 4, sampling={"ignore_eos": True})
    harness.submit("c", list(range(9)), 4, sampling={"ignore_eos": True})
    harness.run()
    for rid, prompt, n in (("a", [1, 2, 3], 20), ("b", list(range(30)), 4), ("c", list(range(9)), 4)):
        assert harness.tokens(rid) == oracle(prompt, n, ignore_eos=True), rid


def test_the_table_of_a_mirror_is_as_old_as_its_batch() -> None:
    rows = ReqToTokenPool(2, 8, 4, mirrored=True)
    mirror = rows.host.copy()
    row = rows.alloc()
    rows.write(row, 0, np.array([5, 6, 7], np.int64))
    changes = rows.take_changes()
    rows.write_pages(np.array([row]), np.array([4]), np.array([3]), 4)
    assert changes is not None
    mirror.reshape(-1)[changes.places] = changes.slots
    assert mirror[row].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    changes = rows.take_changes()
    assert changes is not None
    mirror.reshape(-1)[changes.places] = changes.slots
    assert (mirror == rows.host).all()
    assert rows.take_changes() is None
