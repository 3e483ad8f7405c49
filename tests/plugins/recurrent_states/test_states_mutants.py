"""What goes wrong where slots are dealt out wrongly is found by the games of `test_states`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from pegboard.core.interfaces.req import Req
from pegboard.plugins.recurrent_states.slots import USE, Span, StateSlots, Use
from pegboard.plugins.recurrent_states.snapshots import Snapshot
from pegboard.toolkit.cache import kept_prefixes
from tests.plugins.recurrent_states import state_harness, test_states


class TwoSlotsEach(StateSlots):
    """Also where the step behind one that failed has run already."""

    def __init__(self, count: int, page_size: int, every: int, each: int, ahead: int) -> None:
        super().__init__(count, page_size, every, 2, ahead)


class EvictsWhatIsReadNext(StateSlots):
    def spans(self, *step: Any) -> list[Span]:
        held = self._held.copy()
        self._held.clear()
        found = super().spans(*step)
        self._held += held
        return found


class WritesInPlace(StateSlots):
    def _span(self, req: Req, source: int, tokens: tuple[int, int], needed: AbstractSet[int], ahead: int) -> Span:
        span = super()._span(req, source, tokens, needed, ahead)
        if source:
            span.marks[-1].slot = source
        return span


class GoesOnFromWhatWasUndone(StateSlots):
    def _source(self, req: Req, start: int, stop: int) -> Span | int:
        spans = USE.of(req).spans
        return spans[-1].source if spans and spans[-1].start > start else super()._source(req, start, stop)


class FreesWhatIsReadNext(StateSlots):
    """A mark for which there is a snapshot already."""

    def computed(self, req: Req, start: int) -> None:
        for span in USE.of(req).spans:
            for mark in span.marks:
                if mark.kept and span.start == start:
                    mark.kept = False
                    self.pending -= 1
                    if not self.snapshots.add(req, Snapshot(mark.slot, mark.stop)):
                        self.free.append(mark.slot)


class GoesOnFromTheLastDraft(StateSlots):
    """Whether it stands or not."""

    def _source(self, req: Req, start: int, stop: int) -> Span | int:
        found = super()._source(req, start, stop)
        spans = USE.of(req).spans
        return spans[-1].marks[-1].slot if isinstance(found, int) and spans and spans[-1].ahead else found


class KeepsWhatWasRejected(StateSlots):
    def _keep_what_stands(self, req: Req, use: Use, span: Span) -> None:
        done, req.kv.committed_len = req.kv.committed_len, span.stop
        super()._keep_what_stands(req, use, span)
        req.kv.committed_len = done


class PromisesWithoutCounting(StateSlots):
    def promise(self, reqs: Sequence[Req], most: Sequence[int], room: int) -> list[int]:
        return [min(count, self._ahead) for count in most]


MUTANTS = [
    (TwoSlotsEach, 2),
    (EvictsWhatIsReadNext, 3),
    (WritesInPlace, 0),
    (GoesOnFromWhatWasUndone, 2),
    (FreesWhatIsReadNext, 20),
]


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[StateSlots], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_harness, "StateSlots", mutant)
    with pytest.raises(AssertionError):
        test_states.TestGames().play(seed)


def test_snapshots_of_other_tokens_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_length(req: Req, lengths: Iterable[int]) -> dict[int, bytes]:
        return {length: str(length).encode() for length in lengths}

    monkeypatch.setattr(kept_prefixes, "digests", by_length)
    with pytest.raises(AssertionError):
        test_states.TestGames().play(4)


def test_what_is_noted_before_it_is_computed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotesEarly(StateSlots):
        def spans(self, reqs: Sequence[Req], starts: Sequence[int], stops: Sequence[int], *more: Any) -> list[Span]:
            found = super().spans(reqs, starts, stops, *more)
            for req, start in zip(reqs, starts, strict=True):
                self.computed(req, start)
            return found

    monkeypatch.setattr(state_harness, "StateSlots", NotesEarly)
    with pytest.raises(AssertionError):
        test_states.TestGames().test_what_was_never_computed_is_not_kept("normal")


def test_drafts_that_leave_no_slots_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_harness, "StateSlots", PromisesWithoutCounting)
    with pytest.raises(AssertionError):
        test_states.test_drafts_leave_slots_for_others("normal")


def test_rejected_drafts_as_snapshots_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_harness, "StateSlots", KeepsWhatWasRejected)
    with pytest.raises(AssertionError):
        test_states.test_what_was_rejected_becomes_no_snapshot("normal")


def test_drafts_that_are_taken_to_stand_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_harness, "StateSlots", GoesOnFromTheLastDraft)
    with pytest.raises(AssertionError):
        test_states.test_drafts_change_no_token("normal", 0.5)
