"""What the core offers sources that stages bring, and what a stage brings that is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.messages import AbortRequest, TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.core.interfaces.step import SETTLE, BaseStep, CoreServices, Settle, StageStep, StepSource, TokenValues
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.services import Services
from tests.core.pipeline.harness import IGNORE, FakeModel, Harness, oracle
from tests.core.pipeline.noticing import noticed
from tests.core.pipeline.test_sources import CountingModel

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class Sums(StepSource[StageStep, int]):
    """Adds up the slots of one request, once."""

    def __init__(self, core: CoreServices, harness: Harness) -> None:
        self.core, self.harness, self.found = core, harness, -1

    def next(self, in_flight: BaseStep | None) -> StageStep | Settle | None:
        if self.found >= 0 or not self.core.decoding:
            return None
        if in_flight is not None:
            return SETTLE
        (req,) = self.harness.scheduler.running.reqs
        self.slots = self.core.slots(req)
        self.asked = self.core.ask("sum", [1, 2])
        self.found = 0
        step = StageStep(self.core.next_number(), StageWork("sum", self.slots.tolist()))
        step.source = self
        return step

    def process_result(self, step: StageStep, result: int) -> None:
        self.found = result

    def failed(self, step: StageStep, error: Exception) -> None:
        self.core.note(step.number, "a sum", error)
        self.core.end(self.harness.scheduler.running.reqs, self.core.told("adding", error), "no_sum")

    def undo(self, step: StageStep) -> None:
        raise AssertionError


class Brings(Stage):
    name = "sum"

    def __init__(self) -> None:
        self.harness: Any = None

    def sources(self, core: CoreServices) -> list[Sums]:
        self.made = Sums(core, self.harness)
        return [self.made]


def with_sums(loop: str) -> tuple[Harness, Sums, Any]:
    harness = Harness(loop=loop, joining=[stage := Brings()], model=CountingModel)
    stage.made.harness = harness
    return harness, stage.made, harness.model


@LOOPS
def test_a_source_reads_where_kv_is_and_asks(loop: str) -> None:
    harness, source, _ = with_sums(loop)
    harness.submit("a", [1, 2, 3], 6, **IGNORE)
    harness.run()
    assert source.asked == 3
    assert len(source.slots) >= 3
    assert source.slots.dtype == np.int64
    assert source.found == source.slots.sum()
    assert harness.tokens("a") == oracle([1, 2, 3], 6, ignore_eos=True)


@LOOPS
def test_a_source_ends_requests_that_are_to_blame(loop: str) -> None:
    harness, source, model = with_sums(loop)
    vars(source.core)["ask"] = lambda stage, payload: setattr(model, "fails", 1)
    harness.submit("a", [1, 2, 3], 6, **IGNORE)
    harness.run()
    reason = harness.finish("a")
    assert (reason["status"], reason["code"]) == (500, "no_sum")
    assert reason["message"].startswith("adding failed: ")
    assert harness.scheduler.counters.failed_batches == 1


class Named(Sums):
    def next(self, in_flight: BaseStep | None) -> None:
        return None


class Before(Named):
    first = True


class After(Named):
    pass


class Decodes(Named):
    turn = "decode"


def test_sources_are_asked_in_their_turn_and_order() -> None:
    class All(Stage):
        name = "all"

        def sources(self, core: CoreServices) -> list[Named]:
            return [kind(core, harness) for kind in (After, Before, Decodes)]

    harness: Any = None
    planner = Harness(joining=[All()], model=FakeModel).scheduler.planner
    names = [
        [type(getattr(one, "inner", one)).__name__ for one in turn] for turn in (planner.prefills, planner.decodes)
    ]
    assert names == [["Before", "Prefill", "After"], ["Decode", "Decodes"]]


def test_what_is_no_source_is_refused_by_name() -> None:
    class Wrong(Stage):
        name = "wrong"

        def sources(self, core: CoreServices) -> Any:
            return ["a source"]

    with pytest.raises(PluginError, match=r"the stage 'wrong': sources\(\) brings 'a source', which is not"):
        Harness(joining=[Wrong()])


@LOOPS
@pytest.mark.parametrize("aborted", [False, True])
def test_it_is_idle_after_a_request_that_no_batch_was_run_for(loop: str, aborted: bool) -> None:
    idle: list[int] = []
    stage = Brings()
    harness = stage.harness = Harness(loop=loop, joining=[stage], hooks=StepHooks(idle=(lambda: idle.append(1),)))
    harness.submit("a", [1] * 4, 1, **IGNORE)
    req, core = harness.scheduler.requests.alive["a"], stage.made.core
    harness.scheduler.planner.drop(req)
    assert core.reserve(req)
    if aborted:
        harness.scheduler.receive([AbortRequest(rid="a")])
    else:
        core.begin_computed(req, 4, 9, TokenValues(logprob=0.0, rows={}))
    for _ in range(3):
        harness.step()
    assert harness.finish("a")["type"] == ("abort" if aborted else "length")
    assert not harness.model.batches
    assert idle == [1], "the books were not checked, or more than once"


@LOOPS
def test_memory_that_a_chunked_prompt_still_needs_is_not_reserved(loop: str) -> None:
    stage = Brings()
    harness = stage.harness = Harness(tokens=32, loop=loop, cache="none", chunk=4, joining=[stage])
    harness.submit("long", [1] * 20, 4, **IGNORE)
    for _ in range(2):
        harness.step()
    chunked, planner, core = harness.scheduler.planner.chunked, harness.scheduler.planner, stage.made.core
    assert chunked is not None
    assert chunked.kv.scheduled_len < 20
    harness.submit("brings", [2] * 12, 4, **IGNORE)
    req = harness.scheduler.requests.alive["brings"]
    planner.drop(req)
    assert harness.scheduler.components.memory.available_tokens >= 12
    assert not core.reserve(req), "the rest of the prompt would have no memory"
    while "long" not in harness.outputs or harness.outputs["long"][-1].finish_reason is None:
        harness.step()
    assert harness.tokens("long") == oracle([1] * 20, 4, ignore_eos=True)
    assert harness.scheduler.counters.retractions == 0
    assert core.reserve(req)
    core.give_back(req)
    harness.scheduler.receive([AbortRequest(rid="brings")])


@LOOPS
def test_memory_is_reserved_beside_a_chunked_prompt_where_both_fit(loop: str) -> None:
    stage = Brings()
    harness = stage.harness = Harness(tokens=64, loop=loop, cache="none", chunk=4, joining=[stage])
    harness.submit("long", [1] * 20, 4, **IGNORE)
    harness.step()
    harness.submit("brings", [2] * 12, 4, **IGNORE)
    req = harness.scheduler.requests.alive["brings"]
    harness.scheduler.planner.drop(req)
    assert harness.scheduler.planner.chunked is not None
    assert stage.made.core.reserve(req)
    harness.scheduler.receive([AbortRequest(rid="brings")])
    harness.run()
    assert harness.tokens("long") == oracle([1] * 20, 4, ignore_eos=True)


class Retracts(Stage):
    """Retracts the request "a" once it has so many tokens, if the core lets it."""

    name = "retracts"

    def __init__(self, at: int) -> None:
        self.at = at
        self.answers: list[bool] = []
        self.unplaced_len = -1
        self.computed = -1

    def sources(self, core: CoreServices) -> list[Any]:
        self.core = core
        return []

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        if req.rid == "a":
            self.req = req
        return Interest()

    def due(self) -> bool:
        return not any(self.answers) and self.req.seq_len >= self.at and not self.req.finished

    def must_settle(self, running: Sequence[Req], in_flight: BaseStep) -> bool:
        return self.due()

    def begin_plan(self) -> None:
        if self.due():
            self.answers.append(self.core.retract(self.req))

    def unplaced(self, req: Req) -> None:
        if req is self.req and self.unplaced_len < 0:
            self.unplaced_len, self.computed = req.output_len, req.kv.committed_len


@LOOPS
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_stage_retracts_a_request(loop: str, chunk: int | None) -> None:
    """In any state in which it has memory. It goes on with its output, and no token changes."""
    for at in range(12, 19):
        stage = Retracts(at)
        harness = Harness(loop=loop, chunk=chunk, joining=[stage])
        harness.submit("a", [1, 2, 3] * 4, 8, **IGNORE)
        harness.submit("b", [4] * 9, 8, **IGNORE)
        harness.run()
        assert stage.answers[-1:] == [True], at
        assert stage.req.output.num_retractions == 1
        least = max(at - 12, 0 if chunk else 1)
        # Where steps overlap, one more is launched when it becomes known that there are so many.
        assert stage.unplaced_len in (least, least + (loop == "overlap"))
        assert stage.computed < 12 or at > 12 or chunk is None, "a chunked prompt is not retracted before its end"
        assert harness.tokens("a") == oracle([1, 2, 3] * 4, 8, ignore_eos=True)
        assert harness.tokens("b") == oracle([4] * 9, 8, ignore_eos=True)
        assert harness.scheduler.counters.retractions == 1


def test_what_does_not_run_or_is_under_way_is_not_retracted() -> None:
    stage = Retracts(10_000)
    harness = Harness(loop="overlap", joining=[stage])
    harness.submit("a", [1, 2, 3], 8, **IGNORE)
    assert not stage.core.retract(stage.req), "it waits"
    for _ in range(3):
        harness.step()
    assert harness.scheduler.loop.in_flight is not None
    assert not stage.core.retract(stage.req), "a token of its own is on its way"
    harness.run()
    assert not stage.core.retract(stage.req), "it has ended"
    assert harness.tokens("a") == oracle([1, 2, 3], 8, ignore_eos=True)


@LOOPS
def test_a_stage_ends_requests_with_a_status(loop: str) -> None:
    stage = Retracts(10_000)
    harness = Harness(loop=loop, joining=[stage])
    harness.submit("a", [1, 2, 3], 8, **IGNORE)
    for _ in range(3):
        harness.step()
    stage.core.end([stage.req], "its adapter was unloaded", "adapter_unloaded", 503)
    harness.run()
    reason = harness.finish("a")
    assert (reason["type"], reason["status"], reason["code"]) == ("abort", 503, "adapter_unloaded")


def retracts_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Services, "in_flight", None)


def retracts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Services, "retract", lambda self, req: True)


def retracts_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "holding", property(lambda self: self.waiting))


def forgets_the_chunked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    retract: Any = Services.retract
    monkeypatch.setattr(
        Services, "retract", lambda self, req: req.kv.committed_len >= req.input_len and retract(self, req)
    )


def ends_with_another_status(monkeypatch: pytest.MonkeyPatch) -> None:
    end: Any = Services.end
    monkeypatch.setattr(
        Services, "end", lambda self, reqs, message, code="", status=500: end(self, reqs, message, code)
    )


@pytest.mark.parametrize(
    "change",
    [
        retracts_what_is_under_way, retracts_nothing, retracts_what_waits, forgets_the_chunked_one,
        ends_with_another_status,
    ],
)  # fmt: skip
def test_broken_services_are_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    change(monkeypatch)

    def play() -> None:
        test_what_does_not_run_or_is_under_way_is_not_retracted()
        for loop in ("normal", "overlap"):
            test_a_stage_ends_requests_with_a_status(loop)
            for chunk in (None, 4):
                test_a_stage_retracts_a_request(loop, chunk)

    assert noticed(change, play)
