"""A fake model with a draft beside it: what the pipeline tells a speculator on the device has to be true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from pegboard.plugins.speculation.messages import NAME, DraftWork, Pass
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import FakeModel, Seer

RESERVE = 9
"""Slots behind the newest token that drafts write to: more than a tree of the tests has nodes."""
NOTHING = -1


def states(context: NDArray[np.int64]) -> NDArray[np.int64]:
    """The model's state at each token of a context: all tokens up to it, and their order."""
    return (context * (np.arange(len(context)) * 17 + 3)).cumsum() % 1_000_003


def entries(context: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a draft keeps of each token of a context but the first: the token, and the state before it."""
    return (context[1:] * 7919 + states(context)[:-1]) % 1_000_003


def again_of(work: ModelWorkerBatch) -> NDArray[np.bool_]:
    """Which requests of a batch compute their first token again: its KV goes to the padding."""
    return work.out_cache_loc[np.cumsum(work.extend_lens) - work.extend_lens] == 0


class WatchedModel(FakeModel):
    """Keeps an entry per slot, as a draft's layer of the KV pool does, and the state of each row's last token. Entries
    of what stands must be those of an uninterrupted run, whatever was cached, moved or retracted.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.entries = np.full(len(self.slots), NOTHING, np.int64)
        self.kept: dict[int, tuple[int, int]] = {}
        self.tree: Callable[[DraftRow], TokenTrees] = Seer(0.5).tree_of
        self.drafted = self.looked_back = 0

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        result = super().__call__(work)
        if work.part is None or work.part.last:
            self.observe(work, result.accepted)
        return result

    def check_slots(self, work: ModelWorkerBatch) -> None:
        """Only what is computed again is written where nobody reads it."""
        starts = np.cumsum(work.extend_lens) - work.extend_lens
        again = starts[again_of(work)]
        others = np.delete(work.out_cache_loc, again)
        assert 0 not in others, "page 0 is padding"
        assert len(set(others.tolist())) == len(others), "two tokens in one slot"
        self.looked_back += len(again)

    def observe(self, work: ModelWorkerBatch, accepted: Accepted | None) -> None:
        """Write the entries of what stands, and compare those of each whole context."""
        told = work.payloads[NAME]
        assert isinstance(told, Pass)
        counts = work.extend_lens.copy()
        if work.trees is not None and accepted is not None:
            assert work.logits_indices is not None
            roots = work.logits_indices[tree.starts(work.trees.counts)]
            at = np.searchsorted(np.cumsum(work.extend_lens), roots, "right")
            counts[at] += accepted.counts - work.trees.counts
        for index, row in enumerate(work.rows.tolist()):
            start, end = int(work.prefix_lens[index]), int(work.prefix_lens[index] + counts[index])
            slots = self.table[row, :end]
            context = self.slots[slots]
            fresh, again = bool(told.fresh[index]), bool(again_of(work)[index])
            if fresh:
                assert again == (start + again > 0), "the state before the first new token is not known"
            else:
                assert not again
                assert self.kept[row] == (start, states(context[:start])[-1]), "a state got lost"
            expected = entries(context)
            first = start + 1 if fresh else start
            self.entries[slots[first:]] = expected[first - 1 :]
            assert (self.entries[slots[1:]] == expected).all(), "an entry is not what the tokens before it make it"
            self.kept[row] = end, int(states(context)[-1])
            if told.slots[index] > end:
                self.entries[self.table[row, end]] = NOTHING

    def draft(self, work: DraftWork) -> TokenTrees:
        """Write into all reserved slots, and draft."""
        found = []
        rows = zip(work.rows.tolist(), work.seq_lens.tolist(), work.newest.tolist(), work.most.tolist(), strict=True)
        for row, seq_len, newest, most in rows:
            context = np.append(self.slots[self.table[row, : seq_len - 1]], newest)
            assert self.kept[row] == (seq_len - 1, states(context)[-2])
            slots = self.table[row, seq_len - 1 : seq_len + RESERVE]
            assert len(slots) == RESERVE + 1
            self.entries[slots] = NOTHING
            found.append(self.tree(DraftRow(context, 0, "", most, {})))
        self.drafted += len(found)
        return tree.join(found)
