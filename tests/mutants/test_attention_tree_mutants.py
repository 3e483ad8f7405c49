"""Attention backends that are wrong about draft trees, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch
from tests.mutants.test_attention_mutants import (
    NONE,
    AnswersInFloat32,
    Broken,
    KnowsOneGroup,
    LimitedToABlock,
    NoSinks,
    SilentlyComputesAnyway,
    caught,
)

Tensor = torch.Tensor


class BrokenTrees(Broken):
    """Lets a subclass spoil the tails of a batch, and the masks that are made of them."""

    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if batch.tail_lens_cpu is None else self.spoil_tails(batch, batch.tail_lens_cpu, batch.tail_bits)

    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return batch

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        for kind, plan in batch.attn_metadata.items():
            lens = [] if batch.tail_lens_cpu is None else batch.tail_lens_cpu[batch.tail_lens_cpu > 0].tolist()
            trees = tuple(
                replace(tree, mask=self.spoil_mask(tree.mask.clone(), tail, kind[1]))
                for tree, tail in zip(plan.trees, lens, strict=False)
            )
            batch.attn_metadata[kind] = replace(plan, trees=trees)

    def spoil_mask(self, mask: Tensor, tail: int, window: int | None) -> Tensor:
        return mask


class IgnoresBits(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_lens=None, tail_bits=None, tail_lens_cpu=None)


class ShiftsBits(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_bits=bits << 1)


class TakesNewTokensForTheTail(BrokenTrees):
    """What was cached before is seen by all, whichever branch it stands on."""

    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        new = batch.extend_lens_cpu if batch.extend_lens_cpu is not None else np.ones_like(lens)
        cached = torch.from_numpy(lens - np.minimum(lens, new)).repeat_interleave(torch.from_numpy(new))
        return replace(batch, tail_lens_cpu=np.minimum(lens, new), tail_bits=bits >> cached)


class TakesNeighboursTail(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_lens_cpu=np.minimum(np.roll(lens, 1), batch.seq_lens_cpu))


class GivesEveryoneATail(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_lens_cpu=np.where(lens > 0, lens, 1))


class LosesTheSign(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_bits=bits & 0x7FFFFFFFFFFFFFFF)


class ReadsHalfTheBits(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_bits=bits.int().long())


class MissesItself(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        return replace(batch, tail_bits=torch.where(bits & (bits + 1) == 0, bits >> 1, bits))


class KeepsTheFirstBits(BrokenTrees):
    def spoil_tails(self, batch: ForwardBatch, lens: Any, bits: Any) -> ForwardBatch:
        self.kept = getattr(self, "kept", bits)
        return replace(batch, tail_bits=self.kept)


class HidesWhatIsBeforeTheTail(BrokenTrees):
    def spoil_mask(self, mask: Tensor, tail: int, window: int | None) -> Tensor:
        mask[:, : mask.shape[1] - tail] = -torch.inf
        return mask


class HidesByALargeNumber(BrokenTrees):
    def spoil_mask(self, mask: Tensor, tail: int, window: int | None) -> Tensor:
        return mask.clamp_(min=-1e4)


class CountsSlotsInWindows(BrokenTrees):
    """Of a token's own slot and of its keys': the last `window` slots, whoever they belong to."""

    def spoil_mask(self, mask: Tensor, tail: int, window: int | None) -> Tensor:
        if window is not None:
            new, keys = mask.shape
            behind = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
            mask[:, : keys - tail].zero_()
            mask.masked_fill_(behind >= window, -torch.inf)
        return mask


class ForgetsWindowsInTheTail(BrokenTrees):
    def spoil_mask(self, mask: Tensor, tail: int, window: int | None) -> Tensor:
        if window is not None:
            mask[:, -tail:][:, 0] = 0.0
        return mask


MUTANTS = [
    caught(IgnoresBits, "test_trees"),
    caught(ShiftsBits, "test_trees"),
    caught(TakesNewTokensForTheTail, "test_trees"),
    caught(HidesWhatIsBeforeTheTail, "test_trees"),
    caught(TakesNeighboursTail, "test_trees_in_mixed_batches"),
    caught(GivesEveryoneATail, "test_trees_in_mixed_batches"),
    caught(LosesTheSign, "test_trees_of_64_nodes"),
    caught(ReadsHalfTheBits, "test_trees_of_64_nodes"),
    caught(HidesByALargeNumber, "test_branches_do_not_meet"),
    caught(MissesItself, "test_a_chain_is_causal"),
    caught(AnswersInFloat32, "test_trees_in_16_bits"),
    caught(CountsSlotsInWindows, "test_windows_count_places"),
    caught(ForgetsWindowsInTheTail, "test_windows_count_places"),
    caught(NoSinks, "test_trees_with_cap_and_sinks"),
    caught(LimitedToABlock, "test_trees_behind_long_prefixes"),
    caught(KnowsOneGroup, "test_trees_over_layers"),
    caught(KeepsTheFirstBits, "test_trees_leave_nothing_behind"),
    caught(CountsSlotsInWindows, "test_any_trees"),
    caught(SilentlyComputesAnyway, "test_trees_are_refused", **NONE),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_of_trees_has_a_mutant() -> None:
    """But those that run on a GPU or in the whole matrices only."""
    from pegboard.conformance.attention.trees import AttentionTreeTests

    own = {name for name in vars(AttentionTreeTests) if name.startswith("test")}
    assert own - {mutant.caught_by for mutant in MUTANTS} == {"test_any_larger_trees", "test_any_trees_on_gpu"}
