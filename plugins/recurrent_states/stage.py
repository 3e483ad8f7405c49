"""In the scheduler: requests wait for slots, steps say which slots they read and write, prefixes end at snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.stage import Interest, Stage, Wait
from pegboard.plugins.recurrent_states.messages import NAME, HowMany, Round, StateWork
from pegboard.plugins.recurrent_states.slots import USE
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import AdmissionGateContext
    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepResult, StepView
    from pegboard.core.interfaces.step import AnySource, CoreServices
    from pegboard.plugins.recurrent_states.slots import Span, StateSlots


class States(Stage):
    """Takes part in all requests of a model that keeps states."""

    name = NAME

    def __init__(self, make: Callable[[int], StateSlots]) -> None:
        self._make = make
        self.slots: StateSlots
        """Made with as many slots as its part has memory for."""
        self._planned: set[str] = set()
        """Requests that get slots if this plan takes them in."""
        self._needed: dict[str, int] = {}
        """By request, the slot of the snapshot that it begins from if this plan takes it in."""

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        count = core.ask(self.name, HowMany())
        assert isinstance(count, int)
        self.slots = self._make(count)
        return ()

    def gate(self, ctx: AdmissionGateContext) -> None:
        if ctx.kv is not None:
            raise ConfigError(Problem("gates", "a model that keeps states takes no KV from elsewhere (disaggregation)"))

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def unplaced(self, req: Req) -> None:
        self.slots.release(req)

    # ---- a plan ----------------------------------------------------------------------------------------------------
    def begin_plan(self) -> None:
        self.slots.begin_plan()
        self._planned.clear()
        self._needed.clear()

    def resumable(self, req: Req, length: int) -> int:
        snapshot = self.slots.found(req, length)
        self._needed.pop(req.rid, None)
        if snapshot is None:
            return 0
        self._needed[req.rid] = snapshot.slot
        return snapshot.length

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        if USE.of(req).own or req.rid in self._planned:
            return take
        if self._room() < self.slots.each:
            return Wait.SHORT
        self._planned.add(req.rid)
        return take

    def _room(self) -> int:
        """Return how many slots are left beside those that the plan needs."""
        return self.slots.room(set(self._needed.values())) - self.slots.each * len(self._planned)

    def bound_ahead(self, reqs: Sequence[Req], most: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array(self.slots.promise(reqs, (most - 1).tolist(), self._room()), np.int64) + 1

    # ---- a step ----------------------------------------------------------------------------------------------------
    def pack(self, step: StepView, extras: BatchExtras) -> StateWork:
        batch, trees, ahead = step.batch, step.work.trees, dict[str, int]()
        if trees is not None:
            if not tree.is_chain(trees):
                raise ValueError("states go on from one token to the next, and tokens ahead have branches")
            ahead = {req.rid: count - 1 for req, count in zip(step.sampled, trees.counts.tolist(), strict=True)}
        spans = self.slots.spans(batch.reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), ahead)
        return StateWork(rounds_of(spans))

    def commit(self, step: StepView, result: StepResult) -> None:
        if not self.slots.pending and step.work.trees is None:
            return
        for req, kv, start in zip(step.batch.reqs, step.kvs, step.batch.prefix_lens.tolist(), strict=True):
            if req.kv is kv:
                self.slots.computed(req, start)

    # ---- what is told ----------------------------------------------------------------------------------------------
    def figures(self) -> Mapping[str, float]:
        slots = self.slots
        return {
            "slots": slots.count,
            "slots_of_requests": slots.taken,
            "snapshots": len(slots.snapshots),
            "resumed_requests_total": slots.resumed,
        }

    def idle_error(self) -> str | None:
        slots = self.slots
        if slots.taken or slots.pending:
            return f"{slots.taken} slots of states and {slots.pending} of their marks are taken without requests"
        return None


def rounds_of(spans: Sequence[Span]) -> tuple[Round, ...]:
    """Return the rounds in which the spans of a batch are computed, packed one behind the other."""
    rounds: list[list[tuple[int, int, int, int, bool]]] = []
    first = 0
    for span in spans:
        at, source = span.start, span.source
        for number, mark in enumerate(span.marks):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append((first, mark.stop - at, source, mark.slot, at == 0))
            first += mark.stop - at
            at, source = mark.stop, mark.slot
    return tuple(_round(np.array(runs, np.int64)) for runs in rounds)


def _round(runs: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Round:
    """Return a round of runs int64 [runs, 5]."""
    firsts, lengths, sources, targets, fresh = np.ascontiguousarray(runs.T)
    return Round(firsts, lengths, sources, targets, fresh.astype(np.bool_))
