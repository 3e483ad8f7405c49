"""Broken graphs of model runners, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import BatchStates, FixableAdditions, ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.graphs import DecodeGraphs
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.graphs import ExtraShapes, StaticBatch

Key = tuple[int, ExtraShapes, bool]
"""Of a graph: its size, the extras that it reads, and whether it adds something."""


class OtherGraphs(LayeredRunner):
    """A runner whose graphs are a broken class of them."""

    graphs: type[DecodeGraphs]

    @torch.inference_mode()
    def start(self, pool: KVPool, *row_tables: torch.Tensor, states: Mapping[str, torch.Tensor] | None = None) -> None:
        if self.ctx.capture is not None:
            self._graphs = self.graphs(self._network, self.ctx, self.ctx.capture)
            self._graphs.record(pool, *row_tables, states=states)


class OtherBatches(DecodeGraphs):
    static: type[StaticBatch]

    def _static(self, size: int, extras: ExtraShapes) -> StaticBatch:
        assert self._pool is not None
        return self.static(size, self._tables, self._pool, self.ctx.attention, extras, self._states)


class LeavesPadding(StaticBatch):
    """Padding is written once: a smaller batch leaves what the larger one before has put there."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        fixed, count = self.batch, batch.batch_size
        for mine, other in (
            (fixed.input_ids, batch.input_ids),
            (fixed.positions, batch.positions),
            (fixed.req_pool_indices, batch.req_pool_indices),
            (fixed.seq_lens, batch.seq_lens),
            (fixed.kv_groups[0].out_cache_loc, batch.kv_groups[0].out_cache_loc),
        ):
            mine[:count] = other
        fixed.seq_lens_cpu[:count], fixed.real_size = batch.seq_lens_cpu, count
        return fixed


class KeepsLengths(StaticBatch):
    """The lengths of the first batch that came."""

    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        fixed = super().fill(batch)
        if self.kept is None:
            self.kept = fixed.seq_lens.clone(), torch.from_numpy(fixed.seq_lens_cpu).clone()
        fixed.seq_lens.copy_(self.kept[0])
        np.copyto(fixed.seq_lens_cpu, self.kept[1].numpy())
        return fixed


class KnowsOneTable(StaticBatch):
    """All groups have the first one's."""

    def __init__(self, size: int, row_tables: Sequence[torch.Tensor], *more: Any) -> None:
        super().__init__(size, (row_tables[0],) * len(row_tables), *more)


class KnowsOneGroup(StaticBatch):
    """New tokens of all groups go where those of the first one go."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        first = batch.kv_groups[0].out_cache_loc
        groups = tuple(replace(group, out_cache_loc=first) for group in batch.kv_groups)
        return super().fill(replace(batch, kv_groups=groups))


class TakesNewBuffers(StaticBatch):
    """Ids are padded in a new tensor at each step: no graph reads that."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        kept = self.batch.input_ids
        self.batch.input_ids = torch.zeros_like(kept)
        return super().fill(batch)


class KeepsSlots(StaticBatch):
    """States are read and written where they were in the first batch with as many requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: dict[int, BatchStates] = {}

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.states is not None:
            batch = replace(batch, states=self._kept.setdefault(batch.batch_size, batch.states))
        return super().fill(batch)


class WritesBack(StaticBatch):
    """A state is written where a request that alternates between two slots would have it."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        fixed = super().fill(batch)
        if fixed.states is not None:
            slots = fixed.states.rounds[0]
            others = torch.where(slots.sources % 3 == 1, slots.sources + 1, slots.sources - 1)
            slots.targets.copy_(others.clamp(min=0))
        return fixed


class WritesBesideTargets(StaticBatch):
    """Padding has the slots of the last request."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        fixed, count = super().fill(batch), batch.batch_size
        if fixed.states is not None:
            fixed.states.rounds[0].targets[count:] = fixed.states.rounds[0].targets[count - 1]
        return fixed


class LeavesSlotsOfPadding(StaticBatch):
    """Padding has the slots that the batch before had there."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        if self.batch.states is None:
            return super().fill(batch)
        slots = self.batch.states.rounds[0]
        before = slots.sources.clone(), slots.targets.clone()
        fixed, count = super().fill(batch), batch.batch_size
        for mine, old in zip((slots.sources, slots.targets), before, strict=True):
            mine[count:] = old[count:]
        return fixed


class ReadsBeginnings(DecodeGraphs):
    """States that begin are those of the slots that are named."""

    def _fits(self, batch: ForwardBatch) -> bool:
        if batch.states is not None:
            rounds = tuple(replace(part, fresh=None) for part in batch.states.rounds)
            batch = replace(batch, states=replace(batch.states, rounds=rounds))
        return super()._fits(batch)


class ForgetsExtras(DecodeGraphs):
    """Replays steps with extras as if they had none."""

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        kept, batch.extras = batch.extras, {}
        found = super().logits(batch)
        batch.extras = kept
        return found


class RecordsNoAdditions(DecodeGraphs):
    """Nothing is added to the static batch."""

    def _recorded(self, key: Key, additions: FixableAdditions | None = None) -> bool:
        return super()._recorded(key)


class SharesAdditions(DecodeGraphs):
    """One graph for steps with additions and for those without: whatever came first."""

    def _recorded_late(self, key: Key, additions: FixableAdditions | None) -> bool:
        done = super()._recorded_late(key, additions)
        size, extras, adds = key
        if done:
            self._graphs[size, extras, not adds] = self._graphs[key]
        return done


class ReplaysWantedRows(DecodeGraphs):
    """Any decode step will do."""

    def _fits(self, batch: ForwardBatch) -> bool:
        return batch.forward_mode is ForwardMode.DECODE


class ForgetsToPrepare(DecodeGraphs):
    """The backend's metadata is that of the recording."""

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        graph = self._find(batch)
        if graph is None:
            return None
        graph.static.fill(batch)
        graph.replay()
        return graph.logits[: batch.batch_size]


class ReturnsPadding(DecodeGraphs):
    """Logits of all rows, also of those behind the batch."""

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        found = super().logits(batch)
        graph = None if found is None else self._find(batch)
        return None if graph is None else graph.logits


class LendsLogits(LayeredRunner):
    """The graph's own logits, which the next replay writes to."""

    def _sampled(self, logits: torch.Tensor, sampling: SamplingBatch, return_logits: bool) -> ForwardOutput:
        output = super()._sampled(logits, sampling, return_logits)
        output.logits = logits
        return output


def _batches(static: type[StaticBatch]) -> type[LayeredRunner]:
    return _graphs(type(static.__name__, (OtherBatches,), {"static": static}))


def _graphs(graphs: type[DecodeGraphs]) -> type[LayeredRunner]:
    return type(graphs.__name__, (OtherGraphs,), {"graphs": graphs})


def _mutants() -> Iterator[Mutant]:
    same, moving = "test_a_replay_is_what_the_step_would_be", "test_requests_come_and_go_between_replays"
    groups, states = "test_groups_of_layers_are_part_of_graphs", "test_states_are_part_of_graphs"
    for factory, test in (
        (_batches(LeavesPadding), moving),
        (_batches(KeepsLengths), same),
        (_batches(TakesNewBuffers), same),
        (_batches(KnowsOneTable), groups),
        (_batches(KnowsOneGroup), groups),
        (_batches(KeepsSlots), states),
        (_batches(WritesBack), "test_graphs_read_and_write_any_slots"),
        (_batches(WritesBesideTargets), states),
        (_batches(LeavesSlotsOfPadding), states),
        (_graphs(ReadsBeginnings), "test_steps_in_which_states_begin_are_no_replays"),
        (_graphs(ForgetsToPrepare), same),
        (_graphs(ReturnsPadding), same),
        (_graphs(ReplaysWantedRows), "test_steps_that_want_more_are_no_replays"),
        (_graphs(ForgetsExtras), "test_extras_of_requests_are_part_of_graphs"),
        (_graphs(RecordsNoAdditions), "test_additions_are_part_of_graphs"),
        (_graphs(SharesAdditions), "test_additions_are_part_of_graphs"),
        (LendsLogits, "test_answers_outlive_the_next_replay"),
    ):
        yield Mutant(factory, base=LayeredRunner, suite=ModelRunnerContract, caught_by=test)


@pytest.mark.parametrize("mutant", list(_mutants()), ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
