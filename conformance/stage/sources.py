"""The conformance suite of the sources of steps that a stage brings.

A class says how to make the stage, and what its device part would answer to work of it::

    class TestMySources(SourceContract):
        def make_stage(self) -> Stage:
            return MyStage(stage_context())

        def work(self, payload: object) -> object:
            return sum(payload)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pegboard.conformance.stage.rig import StageRig
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import SETTLE, AnySource, BaseStep, BatchStep, CoreServices, Settle

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PROMPTS = {f"r{n}": [(n * 7 + i) % 250 for i in range(5 + 9 * n)] for n in range(5)}
LENGTH = 8
ENDS = ("process_result", "failed", "behind_failed", "undo")


class SourceContract:
    """Each step of a source ends once, costs no request a token, and leaves nothing behind."""

    def make_stage(self) -> Stage:
        """Return a new stage. Override."""
        raise NotImplementedError("say how to make the stage: override make_stage")

    def work(self, payload: object) -> object:
        """Return what the `run` of its device part would return. Override where it has StageWork done."""
        raise NotImplementedError("say what its work results in: override work")

    def submit(self, rig: StageRig, rid: str) -> None:
        """Send one of the requests PROMPTS."""
        rig.submit(rid, PROMPTS[rid], LENGTH, {})

    # ---- the tests -------------------------------------------------------------------------------------------------

    @LOOPS
    def test_each_step_ends_once_and_no_token_changes(self, loop: str) -> None:
        watch = self.play(loop)
        assert watch.steps, "its sources have planned no step for the requests of this suite; override submit"
        watch.check(ended=set(PROMPTS))

    @LOOPS
    @pytest.mark.parametrize("every", [2, 3, 5])
    def test_steps_that_fail_end_once_too(self, loop: str, every: int) -> None:
        """Batches fail, as does the work of stages, and may pass when they are tried again."""
        self.play(loop, every=every).check(ended=set())

    @LOOPS
    @pytest.mark.parametrize("steps", range(1, 9, 2))
    def test_nothing_is_held_for_requests_that_ended(self, loop: str, steps: int) -> None:
        """Some are aborted while a step of theirs may be under way, and memory is short."""
        self.play(loop, tokens=96, abort_after=steps).check(ended=set(PROMPTS) - {"r3", "r4"})

    # ---- what they share -------------------------------------------------------------------------------------------

    def play(self, loop: str, *, every: int = 0, tokens: int = 512, abort_after: int = 0) -> _Watch:
        """Run all requests, one after the other; every so many batches and works of the stage fail."""
        stage = self.make_stage()
        watch = _Watch(stage)
        rig = watch.rig = StageRig([stage], lambda payload, work: {}, loop=loop, tokens=tokens, work=self.work)
        calls = 0

        def fails(_: object) -> bool:
            nonlocal calls
            calls += 1
            return bool(every) and calls % every == 0

        rig.model.fails = rig.model.work_fails = fails
        watch.begin()
        try:
            for rid in PROMPTS:
                self.submit(rig, rid)
                watch.reqs.append(rig.reqs[rid])
                rig.step()
            for _ in range(abort_after):
                rig.step()
            for rid in ("r3", "r4") if abort_after else ():
                rig.abort(rid)
            rig.run()
        finally:
            rig.close()
        raised = [reason.message for reason in rig.components.points.broken.values()]
        assert not raised, f"a source has raised, and would not be asked any more: {'; '.join(raised)}"
        return watch


class _Watch:
    """Notes each step that the sources of a stage plan, and each call that ends it."""

    def __init__(self, stage: Stage) -> None:
        self.rig: StageRig
        self.reqs: list[Req] = []
        self.steps: list[BaseStep] = []
        self.sources: list[AnySource] = []
        self._ends = Counter[int]()
        self._closed = Counter[int]()
        self._depth = 0
        self._wrong: list[str] = []
        brings = stage.sources

        def sources(core: CoreServices) -> Iterable[AnySource]:
            self.sources = list(brings(core))
            for source in self.sources:
                self._watch(source)
            return self.sources

        vars(stage)["sources"] = sources

    def _watch(self, source: AnySource) -> None:
        plan, begin = source.next, source.begin

        def planned(in_flight: BaseStep | None) -> BaseStep | Settle | None:
            step = plan(in_flight)
            if step is SETTLE:
                if in_flight is None:
                    self._wrong.append("next(None) answers SETTLE, and no step is under way")
                again = plan(in_flight)
                if again is not SETTLE:
                    self._wrong.append("it plans over a SETTLE: asked again with the same step under way, it has one")
                    step = again
            if isinstance(step, BaseStep):
                self._note(step)
            return step

        def begun(step: BaseStep) -> BaseStep:
            made: BaseStep = begin(step)
            self._note(made)
            return made

        vars(source).update(next=planned, begin=begun, **{name: self._ended(getattr(source, name)) for name in ENDS})

    def _note(self, step: BaseStep) -> None:
        if not hasattr(step, "source"):
            self._wrong.append(f"{type(step).__name__}.source is not set")
        if any(other.number == step.number for other in self.steps if other is not step):
            self._wrong.append(f"two steps have the number {step.number}; CoreServices.next_number gives new ones")
        self.steps.append(step)

    def _ended(self, call: Callable[..., None]) -> Callable[..., None]:
        def ended(step: BaseStep, *rest: Any) -> None:
            self._ends[id(step)] += self._depth == 0
            self._depth += 1
            try:
                call(step, *rest)
            finally:
                self._depth -= 1

        return ended

    def begin(self) -> None:
        """Count what is closed from now on."""
        planner = self.rig.scheduler.planner
        close = planner.closed

        def closed(step: Any) -> None:
            self._closed[(step.whole or step).number] += 1
            close(step)

        vars(planner)["closed"] = closed

    def check(self, ended: set[str]) -> None:
        """Compare tokens with those that requests get alone, all of them for `ended`, and look for what is left."""
        assert not self._wrong, self._wrong[0]
        for step in self.steps:
            assert self._ends[id(step)] == 1, f"step {step.number} has ended {self._ends[id(step)]} times"
            if isinstance(step, BatchStep):
                times = self._closed[(step.whole or step).number]
                assert times == 1, f"CoreServices.closed was called {times} times for batch {step.number}"
        for source in self.sources:
            assert source.under_way is None, f"a step of {type(source).__name__} is still under way"
            held = [req.rid for req in self.reqs if source.holds(req)]
            assert not held, f"{type(source).__name__} holds requests that have ended: {', '.join(held)}"
        assert (error := self.rig.components.memory.idle_error()) is None, error
        for rid in PROMPTS:
            tokens, alone = self.rig.tokens(rid), _alone(rid)
            same = tokens == (alone if rid in ended else alone[: len(tokens)])
            assert same, f"{rid} gets other tokens than without the stage: {tokens}, not {alone}"


def _alone(rid: str) -> list[int]:
    rig = StageRig([], lambda payload, work: {})
    rig.submit(rid, PROMPTS[rid], LENGTH, {})
    rig.run()
    rig.close()
    return rig.tokens(rid)
