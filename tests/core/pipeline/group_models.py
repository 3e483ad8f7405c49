"""Fake models whose layers keep more than one group of KV, or states: each checks that what it is told to read is what
the tokens before say. What it finds wrong is in `wrong`, since the scheduler takes an exception for a failed pass.

What is kept of a token is a hash of all tokens up to it, so a wrong page or slot shows, and one that was given back too
early. What nobody has written, or a failed pass has left behind, is GARBAGE: to read that is an error of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.pipeline.executor import Done
from pegboard.plugins.recurrent_states.messages import NAME as STATES
from pegboard.plugins.recurrent_states.messages import StateWork
from pegboard.plugins.windows.messages import NAME as WINDOWS
from pegboard.plugins.windows.messages import GroupWork, Memory, WindowWork
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from tests.core.pipeline.harness import EMPTY, FakeModel

PRIME = 1_000_003
GARBAGE = -7
Int64s = NDArray[np.int64]


def hashes(tokens: Sequence[int]) -> list[int]:
    """Return a hash of the first n tokens, for each n from 0 on."""
    found = [0]
    for token in tokens:
        found.append((found[-1] * 31 + token + 1) % PRIME)
    return found


class GroupModel(FakeModel):
    """What all of them have in common. `late` says whether a pass that has run fails all the same."""

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        self.wrong: list[str] = []
        self.late: Any = lambda work: False
        self.undone: set[int] = set()
        """Numbers of steps that are undone, whatever they read: the step before each of them was not run."""
        self.waits = False
        """Whether what is wrong counts only once results are taken: `taken` is called for each step then."""
        self._waiting: dict[int, list[str]] = {}

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        before = len(self.wrong)
        try:
            result = super().__call__(work)
        except Exception:
            # Nothing comes of it, whatever it has read: it may go on from a step that was lost.
            del self.wrong[before:]
            self.spoil(work)
            raise
        if self.waits:
            self._waiting.setdefault(work.bid, []).extend(self.wrong[before:])
        if self.waits or work.bid in self.undone:
            del self.wrong[before:]
        if self.late(work):
            raise RuntimeError("out of luck, late")
        return result

    def taken(self, number: int) -> None:
        """Note that the results of a step are taken: it is not undone."""
        self.wrong += self._waiting.pop(number, ())

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        result = super().answer(work)
        self.keep(work)
        return result

    def keep(self, work: ModelWorkerBatch) -> None:
        """Read and write what the layers keep of a batch."""
        raise NotImplementedError

    def spoil(self, work: ModelWorkerBatch) -> None:
        """Leave garbage behind where a pass has failed."""
        raise NotImplementedError

    def read(self, found: Sequence[int], expected: Sequence[int], what: str) -> None:
        """Compare what is read. Raises RuntimeError for garbage."""
        if GARBAGE in found:
            raise RuntimeError(f"{what}: nobody has written it")
        if list(found) != list(expected):
            self.wrong.append(f"{what}: it is of other tokens")

    def contexts(self, work: ModelWorkerBatch) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield row, start and stop of each request's new tokens, and the hashes of all of its tokens up to these."""
        spans = zip(work.rows.tolist(), work.prefix_lens.tolist(), work.seq_lens.tolist(), strict=True)
        for row, start, stop in spans:
            tokens = self.slots[self.table[row, :stop]].tolist()
            if EMPTY in tokens:
                raise RuntimeError("tokens: nobody has written some of them")
            yield row, start, stop, hashes(tokens)


class KeepsStates(GroupModel):
    """Has `count` slots, a state in each."""

    count = 12

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        self.states = np.full(self.count + 1, GARBAGE, np.int64)
        self.stage_parts = {**self.stage_parts, STATES: lambda work: Done(self.count)}
        self.runs: list[int] = []
        """Runs in each round."""

    def keep(self, work: ModelWorkerBatch) -> None:
        payload = work.payloads[STATES]
        assert isinstance(payload, StateWork)
        before = {int(one) for part in payload.rounds[:1] for one in part.sources[~part.fresh]}
        places = [(place, known) for _, start, stop, known in self.contexts(work) for place in range(start, stop)]
        written, seen = set[int](), 0
        for part in payload.rounds:
            self.runs.append(len(part.firsts))
            arrays = part.firsts, part.lengths, self.states[part.sources], part.targets, part.fresh
            for first, length, source, target, fresh in zip(*(one.tolist() for one in arrays), strict=True):
                (at, known), seen = places[first], seen + length
                self.read([0 if fresh else source], [known[at]], f"the state behind {at} tokens")
                if target <= 0 or target in before | written:
                    self.wrong.append(f"slot {target} is nobody's, is written to twice, or read as well")
                written.add(target)
                self.states[target] = known[at + length]
        if seen != len(places):
            self.wrong.append("some tokens are in no run")

    def spoil(self, work: ModelWorkerBatch) -> None:
        payload = work.payloads.get(STATES)
        if isinstance(payload, StateWork):
            for part in payload.rounds:
                self.states[part.targets] = GARBAGE


class KeepsWindows(GroupModel):
    """Has groups with these `windows`, and `count` pages for each. `lost` says whether a pass fails before its changes
    of tables have arrived.
    """

    windows: Sequence[int] = (5,)
    count = 24
    page_size = 1

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        slots = (self.count + 1) * self.page_size
        self.values = [np.full(slots, GARBAGE, np.int64) for _ in self.windows]
        self.tables = [np.zeros(rows.host.shape, np.int32) for _ in self.windows]
        memory = Memory((self.count,) * len(self.windows), *rows.host.shape)
        self.stage_parts = {**self.stage_parts, WINDOWS: lambda work: Done(memory)}
        self.lost: Any = lambda work: False

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        if self.lost(work):
            if work.table is not None:
                self.send_table(work.table)
            self.slots[work.out_cache_loc] = EMPTY
            self.spoil(work)
            raise RuntimeError("out of luck, early")
        payload = work.payloads.get(WINDOWS)
        if isinstance(payload, WindowWork):
            for table, group in zip(self.tables, payload.groups, strict=True):
                table.reshape(-1)[group.places] = group.slots
        return super().__call__(work)

    def keep(self, work: ModelWorkerBatch) -> None:
        payload = work.payloads[WINDOWS]
        assert isinstance(payload, WindowWork)
        for number, group in enumerate(payload.groups):
            self._keep(number, group, work)

    def _keep(self, number: int, group: GroupWork, work: ModelWorkerBatch) -> None:
        values, table, window, at = self.values[number], self.tables[number], self.windows[number], 0
        slots = group.out_cache_loc.tolist()
        if min(slots) < self.page_size or len(set(slots)) < len(slots):
            self.wrong.append("tokens go to the page of padding, or two into one slot")
        for row, start, stop, known in self.contexts(work):
            if table[row, start:stop].tolist() != slots[at : at + stop - start]:
                self.wrong.append("the table has other slots than the tokens go to")
            first = max(0, start - window + 1)
            self.read(values[table[row, first:start]].tolist(), known[first + 1 : start + 1], f"a window of {window}")
            values[slots[at : at + stop - start]] = known[start + 1 :]
            at += stop - start

    def spoil(self, work: ModelWorkerBatch) -> None:
        payload = work.payloads.get(WINDOWS)
        if isinstance(payload, WindowWork):
            for values, group in zip(self.values, payload.groups, strict=True):
                values[group.out_cache_loc] = GARBAGE
