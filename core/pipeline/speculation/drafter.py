"""Drafter: asks the speculator for the drafts of a step, within what memory, requests and grammars allow.

It guards the engine from the speculator: whatever that one does, a step runs, without drafts if need be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.batch import DraftWork
from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.speculator import DraftRow
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.grammar.drafts import DraftWalk, NodeMasks
from pegboard.core.pipeline.grammar.state import let_through, state_of
from pegboard.core.pipeline.running import SINGLE
from pegboard.core.pipeline.speculation.device import MAX_FAILURES, worth_telling
from pegboard.core.pipeline.speculation.drafts import Drafts
from pegboard.core.pipeline.speculation.worth import Acceptance, StepTimes, Worth
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.interfaces.speculator import Speculator
    from pegboard.core.pipeline.grammar.follow import GrammarFollower
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.settings import SpeculationSettings
    from pegboard.core.pipeline.speculation.device import DeviceDrafts
    from pegboard.core.pipeline.speculation.judging import Judge
    from pegboard.core.pipeline.step import Step

logger = logging.getLogger(__name__)

SPECULATION = "speculation"
"""The stage whose work drafting is."""
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
    how its drafts did.
    """

    allowed: bool | None = None
    memo: dict[object, Any] = field(default_factory=dict)
    acceptance: Acceptance | None = None


_DRAFTED: ReqSlot[_Drafted] = ReqSlot(_Drafted)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """How a speculator is reached that drafts on the device: `executor` asks it, `reserve` is its own, and `seen` shows
    it what the model computes.
    """

    executor: Executor
    reserve: int
    seen: DeviceDrafts


class Drafter:
    """Drafts for running requests, from `device` if there is one. `undrafted` are the processors and samplers that
    cannot tell drafts from output; `judge` is what the worker asks, for its failures. All calls come from the
    scheduler's loop, with no step under way.
    """

    def __init__(
        self,
        speculator: Speculator,
        settings: SpeculationSettings,
        memory: MemoryManager,
        vocab_size: int,
        *,
        undrafted: Sequence[LogitsProcessor | Sampler] = (),
        grammars: GrammarFollower | None = None,
        device: OnDevice | None = None,
        judge: Judge | None = None,
        name: str = "",
    ) -> None:
        self.name = name or type(speculator).__name__
        self._failures = 0
        self._device = device
        self._judge = judge
        self._speculator = speculator
        self._settings = settings
        self._memory = memory
        self._vocab_size = vocab_size
        self._undrafted = tuple(undrafted)
        self._grammars = grammars
        self._most = min(settings.max_nodes, speculator.max_nodes)
        self._in_a_row = dict.fromkeys(("concerns", "propose", "learn"), 0)
        self._late = False
        self._times = StepTimes()
        self._seconds = self._took = 0.0

    @property
    def failures(self) -> int:
        """How often the speculator has failed since the start."""
        beside = (self._judge, None if self._device is None else self._device.seen)
        return self._failures + sum(one.failures for one in beside if one is not None)

    def take_seconds(self) -> float:
        """Return the seconds that drafting has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def on(self) -> bool:
        """Whether the speculator is asked at all."""
        seen = self._device is None or self._device.seen.on
        return seen and max(self._in_a_row.values()) < MAX_FAILURES

    def concerns(self, running: RunningBatch) -> bool:
        """Return whether these requests may get drafts, so that their newest tokens have to be known first."""
        return self.on and 0 < len(running) <= self._settings.max_batch

    def drafts(self, running: RunningBatch) -> Drafts | None:
        """Return drafts for all running requests that may have one more token, with slots for them; None for none."""
        if not self.concerns(running):
            return None
        since = time.perf_counter()
        try:
            return self._drafts(running)
        finally:
            self._took = time.perf_counter() - since
            self._seconds += self._took

    def _drafts(self, running: RunningBatch) -> Drafts | None:
        places = running.decoding()
        reqs = [running.reqs[place] for place in places.tolist()]
        most = self._bounds(running, places)
        worth = self._worth(reqs) if self._settings.adaptive and (most > 1).any() else None
        if worth is not None:
            most = worth.cut(most)
        if not (most > 1).any():
            return None
        if self._device is not None:
            self._reserve(running, places, most, self._device.reserve)
        asked = np.flatnonzero(most > 1)
        if not asked.shape[0]:
            return None
        found = self._propose(running, places[asked], most[asked])
        if found is None or not (found.counts > 1).any():
            return None
        trees = _among_all(found, asked, [req.tokens.last for req in reqs])
        if worth is not None:
            # Now that it is known for how many requests there are any.
            trees = tree.first_nodes(trees, worth.cut(trees.counts))
        masks, trees = self._follow_grammars(reqs, trees)
        trees, masks = self._find_room(running, places, trees, masks)
        return Drafts(trees, tuple(masks)) if (trees.counts > 1).any() else None

    def learn(self, step: Step, seconds: float) -> None:
        """Take note of a committed step, which took so long."""
        gained, drafts, requests = step.batch.gained, step.drafts, len(step.sampled)
        if not step.prefilled and 0 < requests <= self._settings.max_batch:
            nodes = 0 if drafts is None else int(drafts.trees.counts.sum()) - requests
            self._times.note(requests, nodes, seconds + (self._took if nodes else 0.0))
        if drafts is not None and gained is not None:
            self._tell(step, drafts.trees, gained)

    def _tell(self, step: Step, trees: TokenTrees, gained: NDArray[np.int64]) -> None:
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

    def _bounds(self, running: RunningBatch, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of the requests at `places` how many nodes its tree may have."""
        room = self._memory.rows.width - running.seq_lens[places] + 1
        most = np.minimum(np.minimum(room, running.left[places]), self._most)
        for index, place in enumerate(places.tolist()):
            if not self._allowed(running.reqs[place]):
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
            kept.allowed = False
            params = req.sampling
            if not req.flags & SINGLE and not any(one.wants(params) for one in self._undrafted):
                rolls_back = self._grammars is not None and self._grammars.rolls_back
                kept.allowed = (params.grammar is None or rolls_back) and self._concerns(req)
        if kept.allowed and self._grammars is not None and state_of(req) is not None:
            return self._grammars.work.has_room(req, self._most)
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

    def _ask(self, running: RunningBatch, places: NDArray[np.int64], most: NDArray[np.int64]) -> TokenTrees:
        """Ask for drafts of the requests at `places`, `most` nodes each. Raises what the speculator raises."""
        if self._device is None:
            asked = zip(places.tolist(), most.tolist(), strict=True)
            return self._speculator.propose([_row(running.reqs[place], count) for place, count in asked])
        rows, seq_lens, newest = running.rows[places], running.seq_lens[places], running.last[places]
        work = DraftWork(rows, seq_lens, newest, most, self._memory.rows.take_changes())
        try:
            found = self._device.executor.ask(SPECULATION, work)
            assert isinstance(found, TokenTrees)
            return found
        except Exception:
            # The step runs all the same, and may have pages whose places the worker has not got.
            self._memory.rows.send_again(work.table)
            raise

    def _propose(self, running: RunningBatch, places: NDArray[np.int64], most: NDArray[np.int64]) -> TokenTrees | None:
        """Ask the speculator. Return None where it fails, takes too long, or answers with what are no trees."""
        since, computing = time.perf_counter(), time.thread_time()
        try:
            found = self._ask(running, places, most)
            roots = np.fromiter((running.reqs[place].tokens.last for place in places.tolist()), np.int64, len(places))
            wrong = tree.fault(found, roots, most, self._vocab_size)
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
        self._failures += 1
        self._in_a_row[call] += 1
        if self._in_a_row[call] == 1 and worth_telling(self._failures):
            text = "the speculator %r failed (%s): %s; the step goes on without drafts"
            logger.error(text, self.name, call, what, exc_info=what == "raised")
        if self._in_a_row[call] == MAX_FAILURES:
            logger.error("the speculator %r failed %d times in a row: it is off now", self.name, MAX_FAILURES)

    def _reserve(self, running: RunningBatch, places: NDArray[np.int64], most: NDArray[np.int64], reserve: int) -> None:
        """Get slots for what drafting writes, from memory that no request needs; allow no drafts without."""
        for index in np.flatnonzero(most > 1).tolist():
            place = int(places[index])
            wanted = int(running.seq_lens[place]) + reserve
            if wanted <= running.allocated[place]:
                continue
            # Near the end of the context there is no place for them in the table.
            if wanted > self._memory.rows.width or self._memory.wish(running, place, wanted) < wanted:
                most[index] = 1

    # ---- what of it can be verified -------------------------------------------------------------------------------

    def _follow_grammars(self, reqs: Sequence[Req], trees: TokenTrees) -> tuple[list[NodeMasks | None], TokenTrees]:
        """Cut the drafts that grammars forbid, and find out what they allow after the others."""
        masks: list[NodeMasks | None] = [None] * len(reqs)
        if self._grammars is None or all(state_of(req) is None for req in reqs):
            return masks, trees
        keep = np.ones(trees.tokens.shape[0], np.bool_)
        starts = tree.starts(trees.counts)
        for index, req in enumerate(reqs):
            state, start, count = state_of(req), int(starts[index]), int(trees.counts[index])
            if state is None or count == 1:
                continue
            part = slice(start, start + count)
            jump = self._grammars.jump_ahead if self._grammars.runs_ahead(req) else 0
            walk = DraftWalk(req, state, (trees.tokens[part].tolist(), trees.parents[part].tolist()), jump)
            since = self._grammars.work.now()
            try:
                walk.run()
            except BaseException as error:  # a panic in Rust derives from it alone
                let_through(error)
                logger.exception("the grammar of %s cannot follow drafts: it gets none any more", quoted(req.name))
                walk.keep[1:], _DRAFTED.of(req).allowed = False, False
            self._grammars.work.spent(req, since)
            keep[part] = walk.keep
            masks[index] = walk.masks.keep(walk.keep) if walk.keep[1:].any() else None
        return masks, tree.cut(trees, keep)

    def _find_room(
        self, running: RunningBatch, places: NDArray[np.int64], trees: TokenTrees, masks: list[NodeMasks | None]
    ) -> tuple[TokenTrees, list[NodeMasks | None]]:
        """Get slots for the drafts, from memory that no request needs; cut those that get none."""
        counts = trees.counts
        before = running.seq_lens[places] - 1
        fits = counts.copy()
        for index in np.flatnonzero(before + counts > running.allocated[places]).tolist():
            has = self._memory.wish(running, int(places[index]), int(before[index] + counts[index]))
            fits[index] = min(counts[index], has - before[index])
        if (fits == counts).all():
            return trees, masks
        for index, one in enumerate(masks):
            if one is not None:
                first = np.arange(one.free.shape[0]) < fits[index]
                masks[index] = one.keep(first) if fits[index] > 1 else None
        return tree.first_nodes(trees, fits), masks


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
