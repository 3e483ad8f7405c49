"""Broken stages, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.conformance.stage import StageContract
from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Column, Interest, Sent, Stage, StepResult, StepView, Wait
from pegboard.core.interfaces.stops import TextMatcher

Int64s = NDArray[np.int64]


class Good(Stage):
    """Keeps books of requests and steps, lets a few tokens of a prompt be computed at a time, and counts tokens."""

    name = "books"
    columns = (Column("length", lambda req: req.input_len),)

    def __init__(self) -> None:
        self.reqs: dict[str, Req] = {}
        self.steps: dict[int, list[str]] = {}
        self.counts: dict[str, int] = {}

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        if self.name not in message.features:
            return None
        assert msgspec.msgpack.decode(message.features[self.name]) == "count"
        self.reqs[req.rid] = req
        return Interest()

    def unplaced(self, req: Req) -> None:
        assert req.rid in self.reqs

    def gone(self, req: Req) -> None:
        del self.reqs[req.rid]
        self.counts.pop(req.rid, None)

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        return min(take, 9)

    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        self.steps[step.number] = [req.rid for req in step.batch.reqs if req.flags & self.flag]
        extras.per_request("books.rows", np.array([req.kv.row for req in step.batch.reqs]))
        return None

    def commit(self, step: StepView, result: StepResult) -> None:
        for req in step.sampled:
            if req.rid in self.reqs:
                self.counts[req.rid] = req.output_len

    def closed(self, step: StepView) -> None:
        del self.steps[step.number]

    def send(self, req: Req, start: int, stop: int) -> Sent:
        return Sent(whole=stop, rows=range(start, stop))

    def compile_stops(self, sampling: SamplingParams) -> Pairs:
        return PAIRS


class PairMatcher:
    """Ends a text at two equal letters."""

    def __init__(self) -> None:
        self.last = ""

    @property
    def undecided(self) -> int:
        return len(self.last)

    def before(self, char: str) -> tuple[int, str] | None:
        return None

    def read(self, char: str) -> tuple[int, str] | None:
        last, self.last = self.last, char
        return (2, "pair") if last == char else None

    def restart(self) -> None:
        self.last = ""


class ShowsTheFirst(PairMatcher):
    undecided = 0


class ForgetsNothing(PairMatcher):
    def restart(self) -> None:
        pass


class CountsOnlyTheEnd(PairMatcher):
    def read(self, char: str) -> tuple[int, str] | None:
        return None if super().read(char) is None else (0, "pair")


class HoldsTooMuch(PairMatcher):
    undecided = 2


@dataclass(frozen=True)
class Pairs:
    made: Callable[[], TextMatcher] = PairMatcher
    steps: int = 1
    chars: int = 2

    def matcher(self) -> TextMatcher:
        return self.made()


PAIRS = Pairs()


class CompilesAgain(Good):
    def compile_stops(self, sampling: SamplingParams) -> Pairs:
        return Pairs()


class CostsNothing(Good):
    pairs = Pairs(steps=0)

    def compile_stops(self, sampling: SamplingParams) -> Pairs:
        return self.pairs


class SeesARequestTwice(Good):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Req] = []

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        found = super().arrive(req, message)
        self.queue += [] if found is None else [req]
        return found

    def unplaced(self, req: Req) -> None:
        if not req.finished:
            self.queue.append(req)

    def gone(self, req: Req) -> None:
        super().gone(req)
        self.queue = [one for one in self.queue if one is not req]


class ForgetsTheAborted(Good):
    """Hears of ends from finish reasons of its own, and so of aborts never."""

    def gone(self, req: Req) -> None:
        if req.output_len == req.sampling.max_new_tokens:
            super().gone(req)


class PacksARowTooMany(Good):
    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        extras.per_request("books.more", np.zeros(len(step.batch.reqs) + 1))
        return super().pack(step, extras)


class DoesNotUndo(Good):
    """Takes commits for the end of steps."""

    def commit(self, step: StepView, result: StepResult) -> None:
        super().commit(step, result)
        self.steps.pop(step.number, None)

    def closed(self, step: StepView) -> None:
        pass


class ClipsToMore(Good):
    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        return 9


class ClipsAndKeeps(Good):
    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        self.steps[-take] = [req.rid]
        return take


class Short(Good):
    """Has two places."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[str] = set()
        self.planned: set[str] = set()

    def unplaced(self, req: Req) -> None:
        super().unplaced(req)
        self.taken.discard(req.rid)

    def begin_plan(self) -> None:
        self.planned.clear()

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        if req.rid not in self.planned | self.taken and len(self.planned | self.taken) >= 2:
            return Wait.SHORT
        self.planned.add(req.rid)
        return take

    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        self.taken.update(req.rid for req in step.batch.reqs if req.flags & self.flag)
        return super().pack(step, extras)


class ShortUntilTheEnd(Short):
    """Takes places back where requests end, not where they are retracted."""

    def unplaced(self, req: Req) -> None:
        if req.finished:
            super().unplaced(req)

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        return Wait.SHORT if len(self.taken - {req.rid}) >= 2 else super().clip(req, start, take)


class Skips(Short):
    """Passes over who finds no place."""

    def skips(self, req: Req) -> bool:
        return req.rid not in self.planned | self.taken and len(self.planned | self.taken) >= 2

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        return Wait.SKIP if self.skips(req) else super().clip(req, start, take)


class SkipsWhatItWouldClip(Skips):
    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        return min(take, 9)


class SkipsAndKeeps(Skips):
    def skips(self, req: Req) -> bool:
        self.reqs[f"skipped {req.rid}"] = req
        return super().skips(req)


class HoldsForAPlan(Good):
    """Not broken: what it notes ends with the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[int] = []

    def begin_plan(self) -> None:
        self.wanted.clear()

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        self.wanted.append(start)
        return take


class NotesForEver(HoldsForAPlan):
    def begin_plan(self) -> None:
        pass


class Resumes(Good):
    """Goes on behind every fourth token."""

    def resumable(self, req: Req, length: int) -> int:
        return length // 4 * 4


class ResumesFurther(Resumes):
    def resumable(self, req: Req, length: int) -> int:
        return -(-length // 4) * 4


class ResumesBeforeWhatItSaid(Resumes):
    def resumable(self, req: Req, length: int) -> int:
        return length - 1


class ResumesAndKeeps(Resumes):
    def resumable(self, req: Req, length: int) -> int:
        self.reqs[f"{req.rid}, {length}"] = req
        return super().resumable(req, length)


class Bounds(Good):
    """Lets no request have more than two tokens ahead."""

    def bound_ahead(self, reqs: Sequence[Req], most: Int64s) -> Int64s:
        return np.minimum(most, 3)


class BoundsToMore(Bounds):
    def bound_ahead(self, reqs: Sequence[Req], most: Int64s) -> Int64s:
        return np.maximum(most, 3)


class BoundsToNothing(Bounds):
    def bound_ahead(self, reqs: Sequence[Req], most: Int64s) -> Int64s:
        return most - 2


class BoundsOneMore(Bounds):
    def bound_ahead(self, reqs: Sequence[Req], most: Int64s) -> Int64s:
        return np.append(most, 2)


class BoundsAndKeeps(Bounds):
    def bound_ahead(self, reqs: Sequence[Req], most: Int64s) -> Int64s:
        self.steps[-int(most[0])] = [req.rid for req in reqs]
        return most


class ChangesRequests(Good):
    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        for req in step.batch.reqs:
            req.output.sent_len += 1
        return super().pack(step, extras)


class CountsPacks(Good):
    packs = 0

    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        self.packs += 1
        extras.per_request("books.packs", np.full(len(step.batch.reqs), self.packs))
        return super().pack(step, extras)


class TakesAll(Good):
    """Ends requests that do not ask for it."""

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        self.reqs[req.rid] = req
        return Interest()

    def arrived(self, step: StepView, result: StepResult) -> None:
        result.tokens[:] = 0


class SendsARowTooMany(Good):
    def send(self, req: Req, start: int, stop: int) -> Sent:
        return Sent(rows=range(start, stop + 1))


class TakesPartInNone(Good):
    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return None


class Adopts(Good):
    """Sends with each token how long the context was that it was drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[int]] = {}

    def arrived(self, step: StepView, result: StepResult) -> None:
        for req in step.sampled:
            if req.rid in self.reqs:
                self.rows.setdefault(req.rid, []).append(req.seq_len)

    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        self.rows[req.rid] = [0 if row is None else msgspec.msgpack.decode(row, type=int)]

    def send(self, req: Req, start: int, stop: int) -> Sent:
        return Sent(rows=self.rows.get(req.rid, [])[start:stop])

    def gone(self, req: Req) -> None:
        super().gone(req)
        self.rows.pop(req.rid, None)


class WantsARow(Adopts):
    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        assert row is not None
        super().adopt(req, row)


class LosesTheRow(Adopts):
    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        super().adopt(req, None)


def suite(made: Callable[[], Stage]) -> StageContract:
    class Suite(StageContract):
        def make_stage(self) -> Stage:
            return made()

        def feature(self) -> object:
            return "count"

        def ended_text(self) -> tuple[SamplingParams, str]:
            return SamplingParams(), "abba, baaab"

    return Suite()


def run(made: Callable[[], Stage], test: str) -> None:
    method: Any = getattr(suite(made), test)
    for loop in ("normal", "overlap"):
        method(*([loop] if "loop" in signature(method).parameters else []))


TESTS = [name for name in vars(StageContract) if name.startswith("test_")]
ORIGINALS: dict[str, type[Stage]] = {
    "adopted": Adopts,
    "resumable": Resumes,
    "bound_ahead": Bounds,
    "short": Short,
    "skips": Skips,
}
BOUND = "test_bound_ahead_answers_within_what_it_is_asked"
MUTANTS: list[tuple[type[Stage], str, str]] = [
    (SeesARequestTwice, "test_a_request_is_known_once", "that arrived once"),
    (ForgetsTheAborted, "test_nothing_is_left_of_requests_that_ended", "which is gone"),
    (PacksARowTooMany, "test_it_takes_part_and_fails_nothing", "a batch with its requests failed"),
    (DoesNotUndo, "test_nothing_is_left_of_steps_that_failed", "grows with steps that were undone"),
    (ClipsToMore, "test_clip_answers_within_what_it_is_asked", "from 0 to 1, or a Wait"),
    (ClipsAndKeeps, "test_clip_answers_within_what_it_is_asked", r"clip\(\) keeps something"),
    (NotesForEver, "test_clip_answers_within_what_it_is_asked", r"clip\(\) keeps something"),
    (ShortUntilTheEnd, "test_memory_that_is_short_comes_back", "answers SHORT while no request has memory"),
    (SkipsWhatItWouldClip, "test_what_it_skips_its_clip_skips", r"skips\(\) answers True, and clip\(\) 9"),
    (SkipsAndKeeps, "test_what_it_skips_its_clip_skips", r"skips\(\) keeps requests"),
    (ResumesFurther, "test_resumable_answers_within_what_it_is_asked", "from 0 to 1"),
    (ResumesBeforeWhatItSaid, "test_resumable_answers_within_what_it_is_asked", "and of 1 tokens 0"),
    (ResumesAndKeeps, "test_resumable_answers_within_what_it_is_asked", r"resumable\(\) keeps something"),
    (BoundsToMore, BOUND, "from 1 to what it is asked"),
    (BoundsToNothing, BOUND, "from 1 to what it is asked"),
    (BoundsOneMore, BOUND, "from 1 to what it is asked"),
    (BoundsAndKeeps, BOUND, r"bound_ahead\(\) keeps something"),
    (ChangesRequests, "test_packing_changes_no_request_and_gives_the_same_again", "has changed a request"),
    (CountsPacks, "test_packing_changes_no_request_and_gives_the_same_again", "brings other arrays"),
    (TakesAll, "test_one_that_no_request_wants_changes_no_token", "do not ask for it are others"),
    (SendsARowTooMany, "test_it_takes_part_and_fails_nothing", "requests failed"),
    (CompilesAgain, "test_what_ends_a_text_is_told_in_time", "gives another object"),
    (CostsNothing, "test_what_ends_a_text_is_told_in_time", "it costs nothing"),
    (WantsARow, "test_what_it_sent_elsewhere_is_adopted", "fails a request without a row"),
    (LosesTheRow, "test_what_it_sent_elsewhere_is_adopted", "is not sent on"),
    (TakesPartInNone, "test_it_takes_part_and_fails_nothing", "takes part in no request"),
]


@pytest.mark.parametrize("test", TESTS)
def test_the_original_passes(test: str) -> None:
    run(next((stage for word, stage in ORIGINALS.items() if word in test), Good), test)


def test_what_clip_notes_may_last_as_long_as_its_plan() -> None:
    run(HoldsForAPlan, "test_clip_answers_within_what_it_is_asked")


@pytest.mark.parametrize(("mutant", "test", "says"), MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[Stage], test: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        run(mutant, test)


@pytest.mark.parametrize(
    ("matcher", "says"),
    [
        (ShowsTheFirst, "were not held back"),
        (ForgetsNothing, "1 of 0 characters are undecided"),
        (CountsOnlyTheEnd, "a match from 3 to 3"),
        (HoldsTooMuch, "2 of 1 characters are undecided"),
    ],
)
def test_a_broken_matcher_is_caught(matcher: type[PairMatcher], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Pairs(matcher)
    monkeypatch.setattr(Good, "compile_stops", lambda self, sampling: pairs)
    with pytest.raises(AssertionError, match=says):
        run(Good, "test_what_ends_a_text_is_told_in_time")
