"""Broken sources of steps, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pegboard.conformance.stage.sources import SourceContract
from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import SETTLE, BaseStep, BatchStep, CoreServices, Settle, StageStep, StepSource
from pegboard.plugins.prefill_in_parts.source import SplitPrefill

ONCE = "test_each_step_ends_once_and_no_token_changes"
FAILING = "test_steps_that_fail_end_once_too"
HELD = "test_nothing_is_held_for_requests_that_ended"


class Sums(StepSource[StageStep, int]):
    """Has sums computed while requests run, each once the results of the step before are known."""

    turn = "prefill"

    def __init__(self, core: CoreServices) -> None:
        self._core = core
        self._planned = self._calls = 0
        self.found: list[int] = []

    def next(self, in_flight: BaseStep | None) -> StageStep | Settle | None:
        if not self._core.decoding or self._planned > 20:
            return None
        if in_flight is not None:
            return SETTLE
        return self.make()

    def make(self) -> StageStep:
        self._planned += 1
        step = StageStep(self._core.next_number(), StageWork("sums", [self._planned, 1]))
        step.source = self
        return step

    def process_result(self, step: StageStep, result: int) -> None:
        self.found.append(result)

    def failed(self, step: StageStep, error: Exception) -> None:
        self._core.note(step.number, "a sum", error)

    def undo(self, step: StageStep) -> None:
        self._planned -= 1


class PlansOverASettle(Sums):
    def next(self, in_flight: BaseStep | None) -> StageStep | Settle | None:
        self._calls += in_flight is not None
        return self.make() if in_flight is not None and self._calls % 4 == 2 else super().next(in_flight)


class SettlesWhatIsNot(Sums):
    def next(self, in_flight: BaseStep | None) -> StageStep | Settle | None:
        return super().next(in_flight) or SETTLE


class NumbersItself(Sums):
    def make(self) -> StageStep:
        step = super().make()
        step.number = 7
        return step


class RaisesForTheFailed(Sums):
    def failed(self, step: StageStep, error: Exception) -> None:
        raise error


class Whole(SplitPrefill):
    """Runs prefills in two parts of a layer each, where something is to decode."""

    def __init__(self, core: CoreServices) -> None:
        super().__init__(core, 1, 2)


class SettlesNothing(Whole):
    """Its steps are never settled."""

    def process_result(self, step: BatchStep, result: BatchResult) -> None:
        pass


class ClosesNothing(Whole):
    def _close(self, step: BatchStep) -> None:
        pass


class ClosesEachPart(Whole):
    def process_result(self, step: BatchStep, result: BatchResult) -> None:
        super().process_result(step, result)
        self._core.closed(step)


class HoldsForEver(Whole):
    def __init__(self, core: CoreServices) -> None:
        super().__init__(core)
        self.reqs: list[Req] = []

    def _part(self, whole: BatchStep) -> BatchStep:
        self.reqs += whole.reqs
        return super()._part(whole)

    def holds(self, req: Req) -> bool:
        return req in self.reqs


class GoesOnWithWhatFailed(Whole):
    def failed(self, step: BatchStep, error: Exception) -> None:
        self._core.halve(step.whole or step, error)
        self._close(step.whole or step)


def suite(source: type[Any]) -> SourceContract:
    class Brings(Stage):
        name = "sums"

        def sources(self, core: CoreServices) -> list[Any]:
            return [source(core)]

    class Suite(SourceContract):
        def make_stage(self) -> Stage:
            return Brings()

        def work(self, payload: Any) -> object:
            return sum(payload)

    return Suite()


def run(source: type[Any], test: str) -> None:
    method: Any = getattr(suite(source), test)
    more: dict[str, list[dict[str, int]]] = {
        ONCE: [{}],
        FAILING: [{"every": 2}, {"every": 3}, {"every": 5}],
        HELD: [{"steps": n} for n in (1, 3, 5, 7)],
    }
    for loop in ("normal", "overlap"):
        for given in more[test]:
            method(loop, **given)


MUTANTS: list[tuple[type[Any], str, str]] = [
    (PlansOverASettle, ONCE, "it plans over a SETTLE"),
    (SettlesWhatIsNot, ONCE, "answers SETTLE, and no step is under way"),
    (NumbersItself, ONCE, "two steps have the number 7"),
    (RaisesForTheFailed, FAILING, "the work of the stage fails here"),
    (SettlesNothing, ONCE, "requests do not end"),
    (ClosesNothing, ONCE, "closed was called 0 times"),
    (ClosesEachPart, ONCE, "closed was called 3 times"),
    (HoldsForEver, HELD, "holds requests that have ended"),
    (GoesOnWithWhatFailed, FAILING, "has ended|still under way|do not end|gets other"),
]


def test_all_tests_of_the_suite_are_run() -> None:
    tests = [name for name, _ in inspect.getmembers(SourceContract, inspect.isfunction) if name.startswith("test_")]
    assert sorted(tests) == sorted([ONCE, FAILING, HELD])


@pytest.mark.parametrize("test", [ONCE, FAILING, HELD])
@pytest.mark.parametrize("source", [Sums, Whole])
def test_the_originals_pass(source: type[Any], test: str) -> None:
    run(source, test)


@pytest.mark.parametrize(("mutant", "test", "says"), MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[Any], test: str, says: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=says):
        run(mutant, test)
