"""Windows through the whole scheduler: each request gets what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.ahead import AheadRoom
from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage, StepView
from pegboard.core.interfaces.step import StepLost
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.executor import Done
from pegboard.plugins.windows.messages import NAME, Memory
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.stage import Windows
from pegboard.toolkit.cache.group_sizes import GroupSizes
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.cache.windows import most_pages
from tests.core.pipeline.group_games import LOOPS, SHARED, GroupGames, arrangement, cached, own
from tests.core.pipeline.harness import IGNORE, FakeModel, Harness, oracle
from tests.plugins.windows.window_harness import WindowHarness


class Packs(Stage):
    """Takes part in all requests, and calls `does` whenever it packs a step."""

    name = "packs"

    def __init__(self, does: Callable[[StepView], None]) -> None:
        self.does = does

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def pack(self, step: StepView, extras: BatchExtras) -> None:
        self.does(step)


def answer(harness: WindowHarness, asked: Mapping[str, Sequence[int]], n: int) -> None:
    """Have requests answered, and compare."""
    for rid, prompt in asked.items():
        harness.submit(rid, prompt, n, **IGNORE)
    harness.run()
    for rid, prompt in asked.items():
        assert harness.tokens(rid) == oracle(prompt, n, ignore_eos=True), rid


class TestGames(GroupGames):
    ample = {"windows": (20,), "count": 300}

    def make(self, **more: Any) -> Any:
        return WindowHarness(**more)

    def draw(self, rng: random.Random) -> Any:
        settings, windows = arrangement(rng), rng.choice([(5,), (1,), (9,), (3, 16)])
        least = max(most_pages(window, settings["page_size"]) for window in windows)
        count = least + rng.choice([0, 1, 4, least, 3 * least, 40])
        self.packs = Packs(lambda step: None)
        return WindowHarness(windows=windows, count=count, before=[self.packs], **settings)

    def lose(self, harness: Any, luck: random.Random, rng: random.Random) -> None:
        """Passes may fail before their changes of tables have arrived, and steps before windows are packed."""
        lost = rng.choice([0.0, 0.0, 0.1])
        apart = random.Random(str(rng.getstate()[1][:4]))  # the games are otherwise what they were
        unpacked = apart.choice([0.0, 0.0, 0.1])
        harness.paged.lost = lambda work: len(work.rows) > 1 and luck.random() < lost

        def packs(step: StepView) -> None:
            if len(step.batch.reqs) > 1 and apart.random() < unpacked:
                if harness.scheduler.settings.loop == "overlap":
                    harness.paged.undone.add(step.number + 1)
                raise RuntimeError("out of luck, before windows")

        self.packs.does = packs


# ---- prefixes -------------------------------------------------------------------------------------------------------


def test_the_next_turn_begins_behind_the_answer_before() -> None:
    harness = WindowHarness(count=40, every=1000, page_size=4)
    harness.submit("a", SHARED, 50, **IGNORE)
    harness.run()
    said = harness.tokens("a")
    harness.submit("b", [*SHARED, *said, *own(1, 9)], 4)
    harness.run()
    assert cached(harness, "b") >= len(SHARED) + len(said) - 1 - 3


def test_without_the_window_before_it_a_cached_prefix_is_computed_again() -> None:
    """The pages that it would go on from were needed by others."""
    harness = WindowHarness(count=most_pages(5, 1), every=1000)
    for rid, prompt in (("a", SHARED), ("b", own(1, 150)), ("c", SHARED)):
        harness.submit(rid, prompt, 4)
        harness.run()
        assert harness.tokens(rid) == oracle(prompt, 4)
    assert cached(harness, "c") == 0


def test_windows_of_other_tokens_are_not_taken() -> None:
    """Those of the second prompt have taken the place of the first one's, which are as long."""
    harness = WindowHarness(count=12, every=1000)
    for rid, prompt in (("a", SHARED), ("b", own(1, 150)), ("c", SHARED)):
        harness.submit(rid, prompt, 4)
        harness.run()
        assert harness.tokens(rid) == oracle(prompt, 4)


# ---- pages ----------------------------------------------------------------------------------------------------------


@LOOPS
def test_a_request_holds_no_more_than_its_window(loop: str) -> None:
    harness = WindowHarness(windows=(9,), count=200, every=10_000, page_size=4, loop=loop, cache="none")
    harness.submit("a", SHARED[:6], 90, **IGNORE)
    most = 0
    while not harness.scheduler.idle:
        harness.step()
        most = max(most, harness.stage.pages.groups[0].held)
    assert most <= most_pages(9, 4)


@LOOPS
@pytest.mark.parametrize("chunk", [None, 16])
def test_with_pages_for_one_request_all_are_served_in_turn(loop: str, chunk: int | None) -> None:
    harness = WindowHarness(windows=(9,), count=most_pages(9, 4), page_size=4, loop=loop, chunk=chunk)
    asked = {f"r{number}": own(number, 70) for number in range(4)}
    for rid, prompt in asked.items():
        harness.submit(rid, prompt, 8, **IGNORE)
    most = 0
    while not harness.scheduler.idle:
        harness.step()
        most = max(most, len(harness.scheduler.running))
    assert most == 1
    for rid, prompt in asked.items():
        assert harness.tokens(rid) == oracle(prompt, 8, ignore_eos=True)


def test_short_requests_are_promised_no_more_than_they_can_use() -> None:
    harness = WindowHarness(windows=(50,), count=60, page_size=1)
    for number in range(6):
        harness.submit(f"r{number}", own(number, 6), 4, **IGNORE)
    for _ in range(3):
        harness.step()
    assert len(harness.scheduler.running) == 6
    harness.run()


@LOOPS
def test_several_known_tokens_wait_for_pages(loop: str) -> None:
    """A running request that has to compute more tokens than there are pages for is admitted once more, in parts."""
    harness = WindowHarness(count=2 * most_pages(5, 1), loop=loop)
    harness.submit("a", own(1, 9), 60, **IGNORE)
    harness.submit("b", own(2, 9), 30, **IGNORE)
    for _ in range(6):
        harness.step()
    reqs = {req.rid: req for req in harness.scheduler.running.reqs}
    in_flight, harness.scheduler.loop.in_flight = harness.scheduler.loop.in_flight, None
    if in_flight is not None:
        harness.scheduler.settle(in_flight)
    for token in own(3, 30):
        reqs["a"].tokens.append(token)
    known = reqs["a"].tokens.view().tolist()
    harness.scheduler.running.refresh([reqs["a"]])
    harness.run()
    assert harness.tokens("b") == oracle(own(2, 9), 30, ignore_eos=True)
    rest = 69 - len(known)
    assert reqs["a"].tokens.view().tolist() == known + oracle(known, rest, ignore_eos=True)


# ---- steps that fail before a request has pages ----------------------------------------------------------------------


def test_a_chunk_does_not_begin_behind_a_tail_before_the_chunk_before_it() -> None:
    """The step with a prompt's first chunk fails before windows are packed, and the one with the second chunk, which
    was launched behind it, finds a tail that an earlier request of the same tokens has left.
    """
    failing = False

    def fails(step: StepView) -> None:
        nonlocal failing
        if failing and len(step.batch.reqs) > 1:
            failing = False
            raise RuntimeError("out of luck, before windows")

    harness = WindowHarness(
        before=[Packs(fails)], windows=(3,), count=40, cache="none", chunk=16, loop="overlap", prefill_first=True
    )
    for turn in ("before", "after"):
        failing = turn == "after"
        asked = {f"short {turn}": own(1 if failing else 2, 4), f"long {turn}": SHARED[:60]}
        answer(harness, asked, 6)
    assert harness.scheduler.counters.failed_batches == 1


def test_a_tail_that_goes_before_its_step_is_packed_costs_a_plan() -> None:
    """Two requests are planned, the second of them behind a tail. It is gone when the step is packed: both are planned
    once more, and the first one has no pages of which the device was never told.
    """
    gone = False

    def evicts(step: StepView) -> None:
        nonlocal gone
        if not gone and len(step.batch.reqs) == 2 and step.batch.prefix_lens[1]:
            gone = True
            while harness.stage.pages.tails.evict_one():
                pass

    harness = WindowHarness(before=[Packs(evicts)], count=60)
    answer(harness, {"before": SHARED[:40]}, 4)
    answer(harness, {"other": own(1, 30), "behind": [*SHARED[:40], *own(2, 9)]}, 6)
    assert gone
    assert harness.scheduler.counters.failed_batches == 1


def test_no_request_has_pages_where_a_tail_of_another_one_is_gone() -> None:
    harness = WindowHarness(count=60)
    for rid, prompt in (("a", own(1, 30)), ("b", own(2, 30))):
        harness.submit(rid, prompt, 4)
    reqs = list(harness.scheduler.waiting)
    reqs[1].kv.prefix_len = 8
    pages, rows = harness.stage.pages, np.array([1, 2])
    with pytest.raises(StepLost, match="the window before token 8"):
        pages.extend(reqs, rows, np.array([0, 8]), np.array([30, 30]))
    assert not pages.groups[0].held
    assert pages.idle_error() is None


def test_a_tail_that_a_plan_has_found_is_not_the_next_one_to_go() -> None:
    harness = WindowHarness(count=200, every=1000)
    for rid, prompt in (("a", own(1, 30)), ("b", own(2, 30))):
        answer(harness, {rid: prompt}, 4)
    tails = harness.stage.pages.tails
    assert len(tails) > 1
    harness.submit("again", own(1, 30), 4)
    (req,) = harness.scheduler.waiting
    assert harness.stage.resumable(req, 29)
    for _ in range(len(tails) - 1):
        tails.evict_one()
    assert harness.stage.resumable(req, 29)
    harness.run()


# ---- how many run ---------------------------------------------------------------------------------------------------

PAGE, LENGTH, WINDOW, LAYERS = 16, 4096, 512, 5


def most_running(tokens: int, stage: Windows | None, memory: Memory | None) -> int:
    """The most requests of LENGTH tokens that run at once."""

    class Model(FakeModel):
        def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
            super().__init__(rows, num_slots)
            self.stage_parts = {NAME: lambda work: Done(memory)}

    harness = Harness(
        model=Model, joining=[] if stage is None else [stage], tokens=tokens, page_size=PAGE, chunk=512,
        max_context_len=LENGTH, max_running_requests=32,
    )  # fmt: skip
    for number in range(16):
        prompt = np.random.default_rng(number).integers(8, 250, LENGTH - 512).tolist()
        harness.submit(f"r{number}", prompt, 512, **IGNORE)
    most = 0
    while not harness.scheduler.idle:
        harness.step()
        most = max(most, len(harness.scheduler.running))
    return most


def test_the_same_bytes_hold_more_requests() -> None:
    """Five layers of six have a window of 512; requests of 4,096 tokens to their very end."""
    sizes = GroupSizes((1, LAYERS), LENGTH // PAGE, (most_pages(WINDOW, PAGE),), 512 // PAGE)
    pages = 4 * LENGTH // PAGE
    grouped = sizes.fitting(pages * (1 + LAYERS), 0)
    memory = Memory(sizes.further(grouped), 33, LENGTH)
    stage = Windows(lambda found: WindowPages([WINDOW], found, PAGE, 256))
    before, after = most_running(pages * PAGE, None, None), most_running(grouped * PAGE, stage, memory)
    assert before == 4
    assert after / before >= 2.5, f"{before} requests run with one group, {after} with two"


# ---- what does not work with windows --------------------------------------------------------------------------------


class LooksBack(Packs):
    """Has the last token of a cached prefix computed again."""

    lookback = 1

    def __init__(self) -> None:
        super().__init__(lambda step: None)


class Drafts(Packs):
    """Brings tokens ahead."""

    def __init__(self) -> None:
        super().__init__(lambda step: None)

    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        return None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (LooksBack(), "the stage 'packs' computes the last token of a cached prefix again"),
        (Drafts(), "the stage 'packs' brings tokens ahead"),
    ],
    ids=["lookback", "ahead"],
)
def test_a_stage_that_does_not_work_with_windows_is_named_at_the_start(other: Stage, why: str) -> None:
    stage = WindowHarness().stage
    with pytest.raises(ConfigError, match=rf"memory\.window_pages: {why}.*switch the stage off"):
        stage.gate(AdmissionGateContext(stages={stage.name: stage, other.name: other}))
    stage.gate(AdmissionGateContext(stages={stage.name: stage, "packs": Packs(lambda step: None)}))


def test_why_a_stage_that_looks_back_does_not_work() -> None:
    """Its step is lost: the pages of windows end at the prefix, not a token before it."""
    harness = WindowHarness(count=60, joining=[LooksBack()])
    answer(harness, {"before": SHARED[:40]}, 4)
    with pytest.raises(AssertionError):
        answer(harness, {"behind": [*SHARED[:40], *own(2, 9)]}, 4)
    assert harness.scheduler.counters.failed_batches
