"""Speculation: asks the speculator for the drafts of a step, within what the engine allows, and learns what they gain.

It guards the engine from the speculator: whatever that one does, a step runs, without drafts if need be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.stage import Interest, Sent
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from pegboard.plugins.speculation.figures import LoggedFigures
from pegboard.plugins.speculation.messages import MAX_FAILURES, NAME, DraftWork, Pass, Said, worth_telling
from pegboard.plugins.speculation.worth import Acceptance, StepTimes, Worth
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import AheadRoom
    from pegboard.core.interfaces.batch import BatchExtras, ScheduleBatch
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.interfaces.stage import StepResult, StepView
    from pegboard.core.interfaces.step import BaseStep
    from pegboard.plugins.speculation.api import DeviceSpeculator, Speculator
    from pegboard.plugins.speculation.options import SpeculationSection

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.05
"""Drafts that took longer to compute are not used: all requests wait for them. Twice in a row is a failure; once may be
a collection of garbage.
"""
LATE_BY_CLOCK = 0.5
"""The same by the clock, which also counts what other processes on the machine took."""
LATE_ON_DEVICE = 1.0
"""The same for drafts of a model: they take as long as they take, and `adaptive` sees whether that pays."""


@dataclass(slots=True)
class _Drafted:
    """What is kept of a request: whether it may be drafted for, None before the first look; what the speculator keeps;
    how its drafts did. `verified` is a batch that has computed drafts, with the request's index among the sampled ones,
    until what these gained is added to `drafted` and `accepted`. `kv` is its memory, and `since` the step with which it
    got that.
    """

    allowed: bool | None = None
    memo: dict[object, object] = field(default_factory=dict)
    acceptance: Acceptance | None = None
    verified: tuple[ScheduleBatch, int] | None = None
    drafted: int = 0
    accepted: int = 0
    kv: ReqKV | None = None
    since: int = 0

    def settle(self) -> None:
        """Add what the drafts of the last step have gained."""
        if self.verified is None:
            return
        batch, index = self.verified
        assert batch.trees is not None
        if batch.gained is not None and (gained := int(batch.gained[index])):
            self.drafted += int(batch.trees.counts[index]) - 1
            self.accepted += gained - 1
            self.verified = None

    def fresh(self, req: Req, number: int) -> bool:
        """Return whether the request has got its memory with the step of this number, which computes its prompt."""
        if self.kv is not req.kv:
            self.kv, self.since = req.kv, number
        return self.since == number


_DRAFTED: ReqSlot[_Drafted] = ReqSlot(_Drafted)


class Speculation(LoggedFigures):
    """Drafts for running requests. `failed` counts failures of the speculator, which is called `name`; `device` is the
    speculator itself where it drafts on the device, and `judges` says that its part decides which drafts stand.
    """

    def __init__(
        self,
        speculator: Speculator,
        settings: SpeculationSection,
        vocab_size: int,
        failed: Callable[[object], None],
        *,
        name: str = "",
        device: DeviceSpeculator | None = None,
        judges: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__()
        self._called = name or type(speculator).__name__
        self._failures = 0
        self._count_failure = failed
        self._device = device
        self.lookback = 0 if device is None else device.lookback
        self._judges = judges
        self._speculator = speculator
        self._settings = settings
        self._vocab_size = vocab_size
        self._clock = clock
        self._most = min(settings.max_nodes, speculator.max_nodes)
        self._in_a_row = dict.fromkeys(("concerns", "propose", "learn"), 0)
        self._late = False
        self._off = False
        self._times = StepTimes()
        self._took = 0.0
        self._packed = -1

    @property
    def on(self) -> bool:
        """Whether the speculator is asked at all."""
        return not self._off and max(self._in_a_row.values()) < MAX_FAILURES

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def must_settle(self, running: Sequence[Req], in_flight: BaseStep) -> bool:
        return self._concerned(len(running))

    def _concerned(self, running: int) -> bool:
        """Return whether so many requests may get drafts, so that their newest tokens have to be known first."""
        return self.on and 0 < running <= self._settings.max_batch

    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        if not self._concerned(room.running):
            return None
        since = time.perf_counter()
        try:
            return self._drafts(room)
        finally:
            self._took = time.perf_counter() - since
            self.counts.draft_time += self._took

    def ahead_cut(self, seconds: float) -> None:
        self._took += seconds
        self.counts.draft_time += seconds

    def _drafts(self, room: AheadRoom) -> TokenTrees | None:
        reqs, most = room.reqs, self._bounds(room)
        worth = self._worth(reqs) if self._settings.adaptive and (most > 1).any() else None
        if worth is not None:
            most = worth.cut(most)
        if self._device is not None:
            self._reserve(room, most, self._device.reserve)
        asked = np.flatnonzero(most > 1)
        if not asked.shape[0]:
            return None
        found = self._propose(room, asked, most[asked])
        if found is None or not (found.counts > 1).any():
            return None
        trees = _among_all(found, asked, room.newest.tolist())
        # Now that it is known for how many requests there are any.
        return trees if worth is None else tree.first_nodes(trees, worth.cut(trees.counts))

    # ---- a step ----------------------------------------------------------------------------------------------------

    def pack(self, step: StepView, extras: BatchExtras) -> Pass | None:
        if step.number > self._packed:
            # Halves of a step that failed tell nothing of how long it takes.
            self._packed = step.number
            step.notes[NAME] = float(self._clock())
        work = step.work
        if self._device is None and not (self._judges and work.trees is not None):
            return None
        reqs = step.batch.reqs
        fresh = np.zeros(len(reqs), np.bool_)
        for index, req in enumerate(reqs[: len(reqs) - step.batch.decoding]):
            fresh[index] = _DRAFTED.of(req).fresh(req, step.number)
        slots = np.array([kv.allocated_len for kv in step.kvs], np.int64)
        return Pass(work.rows, work.prefix_lens, work.extend_lens, work.logits_indices, work.trees, fresh, slots)

    def arrived(self, step: StepView, result: StepResult) -> None:
        launched = step.notes.get(NAME)
        if isinstance(launched, float):
            step.notes[NAME] = self._clock() - launched
        if step.batch.trees is not None:
            for index in np.flatnonzero(step.batch.trees.counts > 1).tolist():
                _DRAFTED.of(step.sampled[index]).verified = step.batch, index

    def commit(self, step: StepView, result: StepResult) -> None:
        trees, gained, seconds = step.batch.trees, step.batch.gained, step.notes.get(NAME)
        if step.batch.forward_mode is ForwardMode.PREBUILT:
            _DRAFTED.of(step.batch.reqs[0]).fresh(step.batch.reqs[0], step.number)  # no pass brings its memory
        if trees is not None and gained is not None:
            self.counts.note(trees.counts, gained)
            for index in np.flatnonzero(trees.counts > 1).tolist():
                kept = _DRAFTED.of(step.sampled[index])
                kept.settle()
                kept.verified = None
        if isinstance(seconds, float):
            self._learn(step, seconds)

    def send(self, req: Req, start: int, stop: int) -> Sent | None:
        kept = _DRAFTED.peek(req)
        if kept is None:
            return None
        kept.settle()
        return Sent(Said(kept.drafted, kept.accepted)) if kept.drafted else None

    def _learn(self, step: StepView, seconds: float) -> None:
        """Take note of a committed step, which took so long."""
        trees, gained, requests = step.batch.trees, step.batch.gained, len(step.sampled)
        decodes = step.batch.decoding == len(step.batch.reqs)
        if decodes and 0 < requests <= self._settings.max_batch:
            nodes = 0 if trees is None else int(trees.counts.sum()) - requests
            self._times.note(requests, nodes, seconds + (self._took if nodes else 0.0))
        if trees is not None and gained is not None:
            self._tell(step, trees, gained)

    def _tell(self, step: StepView, trees: TokenTrees, gained: NDArray[np.int64]) -> None:
        told = [index for index in np.flatnonzero(trees.counts > 1).tolist() if gained[index]]
        for index in told:
            if (acceptance := _DRAFTED.of(step.sampled[index]).acceptance) is not None:
                acceptance.note(int(trees.counts[index]) - 1, int(gained[index]) - 1)
        rows = [_row(step.sampled[index], 1) for index in told]
        try:
            self._speculator.learn(rows, trees.counts[told], gained[told])
        except Exception:
            self._failed("learn", "raised")
        else:
            self._in_a_row["learn"] = 0

    # ---- how many -------------------------------------------------------------------------------------------------

    def _bounds(self, room: AheadRoom) -> NDArray[np.int64]:
        """Return for each request how many nodes its tree may have."""
        most = np.minimum(room.most, self._most)
        for index in np.flatnonzero(most > 1).tolist():
            if not self._allowed(room.reqs[index]):
                most[index] = 1
        return most

    def _worth(self, reqs: Sequence[Req]) -> Worth:
        """Return what drafts of these requests are worth."""
        plain = self._times.plain(len(reqs))
        chances = [self._acceptance(req).chances() for req in reqs]
        return Worth(chances, plain, (0.0, 0.0) if plain is None else self._times.drafts(len(reqs)))

    def _acceptance(self, req: Req) -> Acceptance:
        kept = _DRAFTED.of(req)
        if kept.acceptance is None:
            kept.acceptance = Acceptance(self._most - 1)
        return kept.acceptance

    def _allowed(self, req: Req) -> bool:
        """Return whether a request may be drafted for, which its parameters decide once and for all."""
        kept = _DRAFTED.of(req)
        if kept.allowed is None:
            kept.allowed = self._concerns(req)
        return kept.allowed

    def _concerns(self, req: Req) -> bool:
        if not self.on:
            return False
        try:
            concerned = bool(self._speculator.concerns(req.sampling))
        except Exception:
            self._failed("concerns", "raised")
            return False
        self._in_a_row["concerns"] = 0
        return concerned

    # ---- asking ---------------------------------------------------------------------------------------------------

    def _ask(self, room: AheadRoom, asked: NDArray[np.int64], most: NDArray[np.int64]) -> TokenTrees | None:
        """Ask for drafts of the requests `asked`, `most` nodes each; None where the speculator is off. Raises what it
        raises.
        """
        if self._device is None:
            each = zip(asked.tolist(), most.tolist(), strict=True)
            return self._speculator.propose([_row(room.reqs[index], count) for index, count in each])
        work = DraftWork(room.rows[asked], room.known_lens[asked], room.newest[asked], most)
        found = room.ask(NAME, work)
        self._off = found is False
        return found if isinstance(found, TokenTrees) else None

    def _propose(self, room: AheadRoom, asked: NDArray[np.int64], most: NDArray[np.int64]) -> TokenTrees | None:
        """Ask the speculator. Return None where it fails, takes too long, or answers with malformed trees."""
        since, computing = time.perf_counter(), time.thread_time()
        try:
            found = self._ask(room, asked, most)
            if found is None and self._off:
                return None
            assert found is not None
            wrong = tree.fault(found, room.newest[asked], most, self._vocab_size)
        except Exception:
            self._failed("propose", "raised")
            return None
        took, computed = time.perf_counter() - since, time.thread_time() - computing
        on_host = self._device is None
        late = (computed > LATE_SECONDS or took > LATE_BY_CLOCK) if on_host else took > LATE_ON_DEVICE
        was_late, self._late = self._late, late
        if wrong is None and self._late:
            if not was_late:
                return None
            wrong = f"took {took * 1000:.0f} ms, {computed * 1000:.0f} ms of it computing"
        if wrong is not None:
            self._failed("propose", wrong)
            return None
        self._in_a_row["propose"] = 0
        return found

    def _failed(self, call: str, what: str) -> None:
        """Note a failure; the log has the first of several in a row, but not each time, and the last."""
        self._count_failure(self._speculator)
        self._failures += 1
        self._in_a_row[call] += 1
        if self._in_a_row[call] == 1 and worth_telling(self._failures):
            text = "the speculator %r failed (%s): %s; the step goes on without drafts"
            logger.error(text, self._called, call, what, exc_info=what == "raised")
        if self._in_a_row[call] == MAX_FAILURES:
            logger.error("the speculator %r failed %d times in a row: it is off now", self._called, MAX_FAILURES)

    def _reserve(self, room: AheadRoom, most: NDArray[np.int64], reserve: int) -> None:
        """Get slots for what drafting writes, from memory that no request needs; allow no drafts without."""
        for index in np.flatnonzero(most > 1).tolist():
            wanted = int(room.known_lens[index]) + reserve
            if room.wish(index, wanted) < wanted:
                most[index] = 1


def _row(req: Req, most: int) -> DraftRow:
    return DraftRow(req.tokens.view(), req.input_len, req.namespace, most, _DRAFTED.of(req).memo)


def _among_all(trees: TokenTrees, asked: NDArray[np.int64], roots: Sequence[int]) -> TokenTrees:
    """Return the trees of all requests, of which those `asked` have `trees`, and the others none."""
    if asked.shape[0] == len(roots):
        return trees
    places = {one: place for place, one in enumerate(asked.tolist())}
    alone = tree.chains((root, ()) for root in roots)
    both = tree.join((trees, alone))
    which = [places.get(index, asked.shape[0] + index) for index in range(len(roots))]
    return tree.take_part(both, np.array(which, np.int64))
