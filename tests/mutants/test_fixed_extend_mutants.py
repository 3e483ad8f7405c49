"""Attention backends and model runners that are wrong in graphs of prefills, each caught by the test that is meant for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.fixed_extends import AttentionFixedExtendTests
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.prefill_graphs import RunnerPrefillGraphTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
from pegboard.core.interfaces.graphs import GraphCapture
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.prefill_graphs import PrefillGraphs
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.graphs import StaticExtend
from tests.mutants.parted_attention import PARTS, PartedAttention
from tests.mutants.test_attention_graph_mutants import ForgetsScalesInParts, LendsItsBuffers, WindowOffByOne
from tests.mutants.test_attention_mutants import caught

Tensor = torch.Tensor


class PartedExtends(PartedAttention):
    PROVIDES = PartedAttention.PROVIDES | {"graph_extend"}


# Of attention.


class MakesNewLists(PartedExtends):
    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        rows, seen = batch.attn_metadata
        batch.attn_metadata = rows.clone(), seen.clone()


class KeepsOneShape(PartedExtends):
    """Has lists for the last shape only."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        kept = getattr(self, "kept", None)
        if batch.fixed and (kept is None or len(kept[0]) != batch.num_tokens):
            kept = self.kept = tuple(one.clone() for one in batch.attn_metadata)
        if batch.fixed:
            assert kept is not None
            for one, new in zip(kept, batch.attn_metadata, strict=True):
                one.copy_(new)
            batch.attn_metadata = kept


class FreezesThePrefix(PartedExtends):
    """Cuts by the KV that the host knows of when it captures."""

    def sizes(self, seen: Tensor, batch: ForwardBatch) -> Tensor:
        return torch.full_like(seen, max(1, -(-int(batch.seq_lens_cpu.max()) // PARTS)))


class MissesSingles(PartedExtends):
    """A request of one token is taken for padding."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        lens = batch.extend_lens_cpu
        if batch.fixed and batch.forward_mode.is_extend and lens is not None:
            alone = torch.from_numpy(np.flatnonzero(np.repeat(lens, lens) == 1))
            batch.attn_metadata[1][alone] = 1


# Of runners.


class WithPrefills(ModelRunnerContract):
    """The suite as the layered runner has it."""

    prefill_graphs = {"prefill_graph_sizes": [4, 8, 24]}


class OtherPrefills(LayeredRunner):
    """A runner whose graphs of prefills are a broken class of them."""

    graphs: type[PrefillGraphs]

    def _record_prefills(self, capture: GraphCapture, pool: KVPool, row_tables: Sequence[torch.Tensor]) -> None:
        super()._record_prefills(capture, pool, row_tables)
        if self._prefills is not None:
            self._prefills.__class__ = self.graphs


class LeavesPadding(StaticExtend):
    """Padding is written once: its tokens go to where those of a larger batch went."""

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        slots = self.batch.kv_groups[0].out_cache_loc
        before = slots.clone()
        fixed = super().fill(batch)
        slots[batch.num_tokens :] = before[batch.num_tokens :]
        return fixed


class ForgetsToPrepare(PrefillGraphs):
    """The backend's metadata is that of the recording."""

    def hidden(self, batch: ForwardBatch) -> Tensor | None:
        graph = self._find(batch)
        if graph is None:
            return None
        graph.static.fill(batch)
        graph.replay()
        return graph.hidden[: batch.num_tokens]


class PadsSlots(PrefillGraphs):
    """See LeavesPadding."""

    def hidden(self, batch: ForwardBatch) -> Tensor | None:
        graph = self._find(batch)
        if graph is not None:
            graph.static.__class__ = LeavesPadding
        return super().hidden(batch)


class ForgetsChunks(PrefillGraphs):
    """Runs only what is sampled from."""

    def hidden(self, batch: ForwardBatch) -> Tensor | None:
        if batch.logits_indices is not None and len(batch.logits_indices) == 0:
            return torch.zeros(batch.num_tokens, self._hidden.of(torch.empty(1)).shape[1])
        return super().hidden(batch)


class TakesAnySize(PrefillGraphs):
    """A larger batch is cut to the largest graph."""

    def _find(self, batch: ForwardBatch) -> Any:
        return super()._find(batch) or self._graphs[24, True]


class ReplaysExtras(PrefillGraphs):
    def hidden(self, batch: ForwardBatch) -> Tensor | None:
        batch.extras.clear()
        return super().hidden(batch)


def forgets(name: str) -> type[PrefillGraphs]:
    """Replays what has this field as if it had not."""

    class Forgets(PrefillGraphs):
        def _fits(self, batch: ForwardBatch) -> bool:
            cleared: dict[str, Any] = {name: None}
            return super()._fits(replace(batch, **cleared))

    Forgets.__name__ = f"Forgets_{name}"
    return Forgets


class LendsLogits(LayeredRunner):
    """Logits that the next replay writes to."""

    kept: torch.Tensor | None = None

    def _output(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        return_logits: bool,
        return_hidden_states: bool,
    ) -> ForwardOutput:
        output = super()._output(hidden, batch, sampling, return_logits, return_hidden_states)
        if output.logits is not None:
            if self.kept is None:
                self.kept = output.logits.new_empty(9, output.logits.shape[1])
            output.logits = self.kept[: len(output.logits)].copy_(output.logits)
        return output


class ForgetsWantedRows(LayeredRunner):
    """Rows are those of the packed tokens, whichever are wanted."""

    def _output(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        return_logits: bool,
        return_hidden_states: bool,
    ) -> ForwardOutput:
        replayed = self._prefills is not None
        if replayed and batch.hidden_rows is not None:
            batch.hidden_rows = torch.arange(len(batch.hidden_rows))
        return super()._output(hidden, batch, sampling, return_logits, return_hidden_states)


def parted(factory: type[Any], caught_by: str) -> Mutant:
    return caught(factory, caught_by, base=PartedExtends, provides=PartedExtends.PROVIDES)


def runner(factory: type[Any], caught_by: str) -> Mutant:
    if issubclass(factory, PrefillGraphs):
        factory = type(factory.__name__, (OtherPrefills,), {"graphs": factory})
    return Mutant(factory, base=LayeredRunner, suite=WithPrefills, caught_by=caught_by)


MUTANTS = [
    parted(MakesNewLists, "test_fixed_prefills"),
    parted(FreezesThePrefix, "test_fixed_prefills"),
    parted(MissesSingles, "test_fixed_mixed"),
    parted(KeepsOneShape, "test_fixed_shapes"),
    parted(WindowOffByOne, "test_fixed_extend_layers"),
    parted(LendsItsBuffers, "test_fixed_extends_between_others"),
    parted(ForgetsScalesInParts, "test_fixed_extends_eight_bit"),
    runner(ForgetsToPrepare, "test_a_replayed_prefill_is_what_the_batch_would_be"),
    runner(PadsSlots, "test_a_replayed_prefill_is_what_the_batch_would_be"),
    runner(ForgetsChunks, "test_replayed_chunks"),
    runner(LendsLogits, "test_answers_outlive_the_next_replayed_prefill"),
    runner(TakesAnySize, "test_more_tokens_than_any_graph_has"),
    runner(ForgetsWantedRows, "test_replayed_prefills_have_what_is_wanted_of_them"),
    runner(ReplaysExtras, "test_prefills_with_more_are_no_replays"),
    *(runner(forgets(name), "test_prefills_with_more_are_no_replays") for name in ("overlay", "taps")),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    """But those that run in the whole matrices only."""

    def own() -> Iterator[str]:
        for suite in (AttentionFixedExtendTests, RunnerPrefillGraphTests):
            yield from (name for name in vars(suite) if name.startswith("test") and not name.endswith("_matrix"))

    assert set(own()) == {mutant.caught_by for mutant in MUTANTS}
