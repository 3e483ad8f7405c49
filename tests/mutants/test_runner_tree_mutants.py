"""Broken model runners with draft trees, each caught by the test that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.trees import RunnerTreeTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.runner import LayeredRunner


class Changing(LayeredRunner):
    """Not broken: `change` may spoil each batch with tails before it is computed."""

    def change(self, batch: ForwardBatch, bits: torch.Tensor) -> ForwardBatch:
        return batch

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.tail_bits is not None:
            batch = self.change(batch, batch.tail_bits)
        return super().execute(batch, sampling, **wants)


class IgnoresTails(Changing):
    def change(self, batch: ForwardBatch, bits: torch.Tensor) -> ForwardBatch:
        return replace(batch, tail_lens=None, tail_bits=None, tail_lens_cpu=None)


class SeesSiblings(Changing):
    """The first node of each level, instead of the own one."""

    def change(self, batch: ForwardBatch, bits: torch.Tensor) -> ForwardBatch:
        return replace(batch, tail_bits=bits ^ 6 * ((bits & 2) << 1 == 4))


class TailsAreNew(Changing):
    def change(self, batch: ForwardBatch, bits: torch.Tensor) -> ForwardBatch:
        new = torch.ones_like(batch.seq_lens) if batch.extend_lens is None else batch.extend_lens
        assert batch.tail_lens is not None
        cached = (batch.tail_lens - new).clamp(min=0).repeat_interleave(new)
        return replace(batch, tail_lens=torch.minimum(batch.tail_lens, new), tail_bits=bits >> cached)


class StandsAtItsSlot(Changing):
    """Positions are those of the slots, so that keys are turned too far: what is kept of a path is wrong later."""

    def change(self, batch: ForwardBatch, bits: torch.Tensor) -> ForwardBatch:
        if batch.extend_lens is None or batch.extend_prefix_lens is None:
            return batch
        pairs = zip(batch.extend_prefix_lens.tolist(), batch.extend_lens.tolist(), strict=True)
        return replace(batch, positions=torch.cat([torch.arange(first, first + new) for first, new in pairs]))


class UsesTheBackendAfterAll(LayeredRunner):
    """Its base says that it does not."""


class UsesAnother(LayeredRunner):
    """Not broken: it takes another attention backend than the one that it is given."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        from pegboard.conformance.rig.paged import PlainAttention
        from pegboard.core.interfaces.attention import AttentionContext

        super().__init__(options, ctx)
        own = AttentionContext(ctx.spec.layers, 4, torch.float32, ctx.device, 4, ctx.spec.max_context_len)
        self.ctx = replace(ctx, attention=PlainAttention(None, own))

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        return super().execute(replace(batch, attn_backend=self.ctx.attention), sampling, **wants)


class Refusing(UsesAnother):
    """Not broken: it computes attention itself, and knows no trees."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.tail_lens is not None:
            raise Unsupported("refusing", "runner.tree_mask")
        return super().execute(batch, sampling, **wants)


class TakesTreesForChains(Refusing):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        return super().execute(replace(batch, tail_lens=None), sampling, **wants)


def mutant(factory: type, caught_by: str, base: type | None = None, *provides: str) -> Mutant:
    own = frozenset(provides) if provides else None
    return Mutant(factory, suite=ModelRunnerContract, caught_by=caught_by, base=base, provides=own)


MUTANTS = [
    mutant(IgnoresTails, "test_every_path_of_a_tree", None, "tree_mask"),
    mutant(SeesSiblings, "test_every_path_of_a_tree", None, "tree_mask"),
    mutant(TailsAreNew, "test_a_tree_may_grow", None, "tree_mask"),
    mutant(StandsAtItsSlot, "test_an_accepted_path_goes_on", None, "tree_mask"),
    mutant(IgnoresTails, "test_trees_by_the_attention_backend"),
    mutant(UsesTheBackendAfterAll, "test_the_attention_backend_is_not_used", UsesAnother, "own_attention"),
    mutant(TakesTreesForChains, "test_trees_are_refused", None, "own_attention"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_of_trees_has_a_mutant() -> None:
    own = {name for name in vars(RunnerTreeTests) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
