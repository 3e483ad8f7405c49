"""Broken speculators that draft on the device, and the tests of the suite that notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator
from pegboard.plugins.speculation.api import DeviceSpeculator
from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.toolkit.sampling import tree
from tests.fakes.speculators import BranchingSumSpeculator, SumSpeculator


class IsOneInSecret(NgramSpeculator, DeviceSpeculator):
    """Says nothing of it."""


class TakesAModelsLayer(SumSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.layers = (replace(self.layers[0], layer_id=len(ctx.spec.layers) - 1),)


class OpensAGroup(SumSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.layers = (replace(self.layers[0], kv_group=1),)


class ReadsBehindTheModel(SumSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.taps = (len(ctx.spec.layers) + 2,)


class LearnsWhatItIs(SumSpeculator):
    """From its weights."""

    def load(self, ends, attention):
        super().load(ends, attention)
        self.reserve += 1


class WritesThePrefix(SumSpeculator):
    """The looked-back token's entry, without the state that belongs to it."""

    def boundary(self, row, start, own, *, fresh):
        return super().boundary(row, start, own, fresh=fresh)[0], 0


class WritesOneMore(SumSpeculator):
    """Behind the reserve: the last draft's entry, which nothing needs."""

    def draft(self, batch):
        self.reserve += 1
        try:
            return super().draft(batch)
        finally:
            self.reserve -= 1


class WritesEveryToken(SumSpeculator):
    """The newest one's entry, whether or not there is room."""

    def observe(self, batch, taps, stands):
        super().observe(batch, taps, replace(stands, room=stands.room | True))


class WritesForTheModel(SumSpeculator):
    """Fills layer 0, whose shape is another one, with what it likes."""

    def write(self, pool, slots, ids, states):
        super().write(pool, slots, ids, states)
        pool.keys(0)[slots] = 1.0


class RemembersInTheTable(SumSpeculator):
    def draft(self, batch):
        batch.row_table[0] += 1
        return super().draft(batch)


class ReadsTheReserve(SumSpeculator):
    """Adds what lies behind the newest token, before anything is drafted."""

    def grow(self, batch, row, length, newest, most):
        slots = batch.row_table[row, length : length + 1].long()
        kept = batch.kv_pool.keys(self.layers[0].layer_id)
        self.edge[row] += 0.1 * kept[slots, 0].sum(0)
        return super().grow(batch, row, length, newest, most)


class KeepsTheStates(SumSpeculator):
    """Views of the last ones."""

    def observe(self, batch, taps, stands):
        super().observe(batch, taps, stands)
        last = stands.tokens[torch.from_numpy(stands.counts).cumsum(0) - 1].tolist()
        self.views = dict(zip(batch.req_pool_indices.tolist(), last, strict=True)), taps

    def draft(self, batch):
        places, taps = self.views
        for row in places.keys() & set(batch.rows.tolist()):
            self.edge[row] = taps[places[row]]
        return super().draft(batch)


class AnswersWithAView(SumSpeculator):
    def draft(self, batch):
        found = super().draft(batch)
        return replace(found, counts=found.counts * 0 + 1, tokens=batch.newest, parents=batch.newest * 0 - 1)


class ForgetsTheBoundary(SumSpeculator):
    """The state before a pass is its first one: off by one."""

    def boundary(self, row, start, own, *, fresh):
        edge, skipped = super().boundary(row, start, own, fresh=fresh)
        return (own[:1] if start and not fresh else edge), skipped


class TrustsTheRow(SumSpeculator):
    """Whatever was kept last is the request's, if the number of tokens fits."""

    def boundary(self, row, start, own, *, fresh):
        return super().boundary(row, start, own, fresh=False)


class TrustsTheRowBlindly(SumSpeculator):
    def boundary(self, row, start, own, *, fresh):
        return self.edge[row, None].clone(), int(fresh and start > 0)


class TrustsWhatIsWritten(SumSpeculator):
    """Entries that were there for the row are still there."""

    def observe(self, batch, taps, stands):
        before = self.written.copy()
        super().observe(batch, taps, stands)
        self.written = np.maximum(self.written, before)


class CountsAllNodes(SumSpeculator):
    """All tokens of a pass are standing."""

    def observe(self, batch, taps, stands):
        counts = stands.counts if batch.extend_lens_cpu is None else batch.extend_lens_cpu
        super().observe(batch, taps, replace(stands, counts=counts, tokens=torch.arange(batch.num_tokens)))


class TakesTheFirstNodes(BranchingSumSpeculator):
    """So many tokens are standing, but which?"""

    def observe(self, batch, taps, stands):
        if batch.extend_start_loc is not None:
            parts = zip(batch.extend_start_loc.tolist(), stands.counts.tolist(), strict=True)
            stands = replace(stands, tokens=torch.cat([torch.arange(at, at + count) for at, count in parts]))
        super().observe(batch, taps, stands)


class LeavesOutTheNewest(SumSpeculator):
    """Where it had no slot."""

    def grow(self, batch, row, length, newest, most):
        self.written[row] = length
        return super().grow(batch, row, length, newest, most)


class SamplesForAll(SumSpeculator):
    """A token for each request of a pass, in order."""

    def observe(self, batch, taps, stands):
        sampled = stands.sampled * 0 + range(len(stands.sampled))
        super().observe(batch, taps, replace(stands, sampled=sampled))


class LooksAtTheFirst(SumSpeculator):
    """Drafts for all from the same state."""

    def draft(self, batch):
        self.edge[batch.rows] = self.edge[batch.rows[:1]].expand(len(batch.rows), -1)
        self.written[batch.rows] = 0
        return super().draft(batch)


class KnowsNoSuchRow(SumSpeculator):
    def draft(self, batch):
        assert (self.edge_at[batch.rows] >= 0).all()
        return super().draft(batch)


class DraftsForAnyRow(SumSpeculator):
    def draft(self, batch):
        self.edge_at[batch.rows] = batch.seq_lens - 1
        return super().draft(batch)


class BearsAGrudge(SumSpeculator):
    """Once it has missed a pass, a row gets no drafts."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.lost: set[int] = set()

    def observe(self, batch, taps, stands):
        for row, start, fresh in zip(batch.req_pool_indices.tolist(), stands.starts, stands.fresh, strict=True):
            if not fresh and self.edge_at[row] != start:
                self.lost.add(row)
        super().observe(batch, taps, stands)

    def grow(self, batch, row, length, newest, most):
        if row in self.lost:
            return tree.chains([(newest, ())])
        return super().grow(batch, row, length, newest, most)


class CountsOn(SumSpeculator):
    """Takes a pass that is shown again for the next one, and drafts what is no tree."""

    def observe(self, batch, taps, stands):
        again = bool((self.edge_at[batch.req_pool_indices] > stands.starts).any()) and not stands.fresh.any()
        super().observe(batch, taps, stands)
        self.confused = again

    def draft(self, batch):
        found = super().draft(batch)
        return TokenTrees(found.counts, found.tokens + self.confused, found.parents)


class AddsThemUp(SumSpeculator):
    def grow(self, batch, row, length, newest, most):
        assert sum(1 for slot in batch.row_table[row, :length].tolist() if slot < 0) == 0
        return super().grow(batch, row, length, newest, most)


FACTS, WRITES = "test_facts_of_drafting_on_the_device", "test_it_writes_into_slots_of_its_own"
DEVICE = frozenset({"device"})
TREES = DEVICE | {"branches"}
MUTANTS = [
    Mutant(IsOneInSecret, SpeculatorContract, "test_it_does_not_draft_on_the_device", provides=frozenset()),
    *(
        Mutant(
            cls,
            SpeculatorContract,
            test,
            provides=TREES if issubclass(cls, BranchingSumSpeculator) else DEVICE,
            says=says,
        )
        for cls, test, says in [
            (TakesAModelsLayer, FACTS, "are the model's"),
            (OpensAGroup, FACTS, "outside the first KV group"),
            (ReadsBehindTheModel, FACTS, "taps (6,)"),
            (LearnsWhatItIs, FACTS, "facts have changed"),
            (WritesThePrefix, WRITES, "`observe` writes into the slots"),
            (WritesOneMore, WRITES, "`draft` writes into the slots"),
            (WritesEveryToken, WRITES, "`observe` writes into the slots"),
            (WritesForTheModel, WRITES, "layer 0, which is the model's"),
            (RemembersInTheTable, WRITES, "changes the row table"),
            (ReadsTheReserve, "test_free_slots_are_not_read", "nothing of the request"),
            (KeepsTheStates, "test_nothing_given_is_kept", "copy what is needed"),
            (AnswersWithAView, "test_nothing_given_is_kept", "not the newest token"),
            (ForgetsTheBoundary, "test_prompts_in_chunks", "may come from an earlier pass"),
            (WritesThePrefix, "test_cached_prefixes", "its states alone"),
            (TrustsTheRow, "test_rows_are_used_again", "an earlier request"),
            (TrustsTheRowBlindly, "test_rows_are_used_again", "an earlier request"),
            (TrustsWhatIsWritten, "test_rows_are_used_again", "an earlier request"),
            (CountsAllNodes, "test_accepted_drafts", "and nothing else"),
            (TakesTheFirstNodes, "test_accepted_drafts", "and nothing else"),
            (LeavesOutTheNewest, "test_newest_tokens_without_room", "known by its id alone"),
            (SamplesForAll, "test_kinds_of_requests_in_one_pass", "leaves out those in chunks"),
            (LooksAtTheFirst, "test_other_rows_do_not_matter", "more than its own request"),
            (KnowsNoSuchRow, "test_rows_that_were_never_seen", ""),
            (DraftsForAnyRow, "test_rows_that_were_never_seen", "its tree is the newest token"),
            (BearsAGrudge, "test_passes_that_failed", "next request"),
            (CountsOn, "test_passes_that_failed", "ill-formed"),
            (AddsThemUp, "test_work_on_the_device_does_not_grow_with_the_text", "the whole text at each step"),
        ]
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
