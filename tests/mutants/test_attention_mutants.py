"""Broken attention backends, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from pegboard.conformance.attention.chunks import AttentionChunkTests
from pegboard.conformance.attention.common_prefix import AttentionPrefixTests
from pegboard.conformance.attention.eight_bit import AttentionEightBitTests
from pegboard.conformance.attention.fixed import AttentionFixedTests
from pegboard.conformance.attention.fixed_extends import AttentionFixedExtendTests
from pegboard.conformance.attention.latents import AttentionLatentTests
from pegboard.conformance.attention.trees import AttentionTreeTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_torch.backend import TorchAttention
from pegboard.plugins.attn_torch.masks import CausalMasks

Tensor = torch.Tensor


class Broken(TorchAttention):
    """Lets a subclass spoil what `prepare` and `forward` are given, and what `forward` answers."""

    def prepare(self, batch: ForwardBatch) -> None:
        spoilt = self.spoil_batch(batch)
        super().prepare(spoilt)
        batch.attn_metadata = spoilt.attn_metadata

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        spoilt = self.spoil_batch(batch)
        out = super().forward(self.spoil_query(q), k, v, self.spoil_layer(layer), spoilt, sinks=self.spoil_sinks(sinks))
        batch.attn_metadata = spoilt.attn_metadata
        return out

    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def spoil_query(self, q: Tensor) -> Tensor:
        return q

    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer

    def spoil_sinks(self, sinks: Tensor | None) -> Tensor | None:
        return sinks


# What a query sees.


class SeesTheNextToken(Broken):
    class Masks(CausalMasks):
        def get(self, rows: int, cols: int, window: int | None) -> Tensor:
            mask = super().get(rows, cols + 1, window)[:, 1:].clone()
            mask[:-1] = mask[1:].clone()
            return mask

    def __init__(self, options: Any, ctx: Any) -> None:
        super().__init__(options, ctx)
        self._masks = self.Masks(256, 4096, ctx.dtype, ctx.device)


class MissesItself(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, seq_lens_cpu=np.maximum(batch.seq_lens_cpu - 1, 1))


class WindowTooWide(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, window=layer.window and layer.window + 1)


class IgnoresTheWindowInDecode(Broken):
    def _decode(self, q: Tensor, group: Any, layer: LayerSpec, batch: ForwardBatch, sinks: Tensor | None) -> Tensor:
        group = self._plan(replace(layer, window=None), batch).decodes[0]
        return super()._decode(q, group, layer, batch, sinks)


class IgnoresThePrefix(Broken):
    def _extend(self, q: Tensor, k: Any, v: Any, span: Any, layer: LayerSpec, batch: Any, sinks: Any) -> Tensor:
        return super()._extend(q, k, v, replace(span, prefix=0), layer, batch, sinks)


class LimitedToABlock(Broken):
    """Forgets all but the last 256 tokens."""

    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, window=256)


# How scores and heads are computed.


class OwnScale(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, scale=layer.qk_head_dim**-0.5)


class NoCap(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, logit_cap=None)


class NoSinks(Broken):
    def spoil_sinks(self, sinks: Tensor | None) -> Tensor | None:
        return None


class CapsTheScoresUnscaled(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer if layer.logit_cap is None else replace(layer, logit_cap=layer.logit_cap / layer.scale * 1.1)


class InterleavesHeads(Broken):
    """Query head h goes with KV head h % kv_heads."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        shape = len(q), -1, layer.num_kv_heads, layer.qk_head_dim
        out = super().forward(q.view(shape).transpose(1, 2).flatten(1, 2), k, v, layer, batch, sinks=sinks)
        return out.view(len(q), layer.num_kv_heads, -1, layer.v_head_dim).transpose(1, 2).flatten(1, 2)


class SoftmaxOverflows(Broken):
    def _decode(self, q: Tensor, group: Any, layer: LayerSpec, batch: ForwardBatch, sinks: Tensor | None) -> Tensor:
        out = super()._decode(q, group, layer, batch, sinks)
        slots = torch.arange(batch.kv_pool.num_slots)[group.slots].view(group.size, -1)
        keys = batch.kv_pool.keys(layer.layer_id)[slots].repeat_interleave(2, 2)
        scores = torch.einsum("bhd,bkhd->bhk", q[group.tokens], keys) * layer.scale
        return out + 0.0 * scores.exp().sum(-1, keepdim=True)


class ComputesInHalf(Broken):
    def spoil_query(self, q: Tensor) -> Tensor:
        return q.half().to(q.dtype)


class AnswersInFloat32(Broken):
    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        return super().forward(q, k, v, layer, batch, sinks=sinks).float()


# Which memory is read and written.


class ReadsPadding(Broken):
    """Pads with page 0 and relies on the mask."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        for kind, plan in batch.attn_metadata.items():
            groups = [group for group in plan.decodes if group.mask is not None]
            padded = [replace(one, slots=one.slots * (one.mask == 0).flatten()) for one in groups]
            batch.attn_metadata[kind] = replace(plan, decodes=tuple(padded) or plan.decodes)


class TakesPagesForConsecutive(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        steps = torch.arange(batch.kv_groups[0].row_table.shape[1], dtype=torch.int32)
        slots = batch.kv_pool.num_slots
        views = [replace(view, row_table=(view.row_table[:, :1] + steps) % slots) for view in batch.kv_groups]
        return replace(batch, kv_groups=tuple(views))


class ReadsNeighboursRow(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, req_pool_indices=batch.req_pool_indices.roll(1))


class TakesRowsInOrder(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, req_pool_indices=torch.arange(batch.batch_size))


class WritesOneSlotOff(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(
            batch, kv_groups=tuple(replace(one, out_cache_loc=one.out_cache_loc.roll(1)) for one in batch.kv_groups)
        )


class WritesToPageZeroToo(Broken):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        batch.kv_pool.keys(0)[0] = 0
        return batch


class WritesSharedKV(Broken):
    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        if k is None:
            slots = batch.kv_groups[layer.kv_group].out_cache_loc
            k, v = batch.kv_pool.keys(layer.layer_id)[slots], batch.kv_pool.values(layer.layer_id)[slots]
        return super().forward(q, k, v, layer, batch, sinks=sinks)


class KnowsOneGroup(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, kv_group=0)


class ReadsBehindTheWindow(Broken):
    """And multiplies it by zero."""

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: LayerSpec, batch: Any, **more: Any
    ) -> Tensor:
        out = super().forward(q, k, v, layer, batch, **more)
        table = batch.kv_groups[layer.kv_group].row_table
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            out = out + 0 * batch.kv_pool.keys(layer.layer_id)[table[row, :length].long()].sum()
        return out


class KnowsOneLayer(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, layer_id=0)


class KnowsOneWindow(Broken):
    """Keeps one plan for all layers."""

    def _plan(self, layer: LayerSpec, batch: ForwardBatch) -> Any:
        return next(iter(batch.attn_metadata.values()))


class KeepsTheFirstPlan(Broken):
    def prepare(self, batch: ForwardBatch) -> None:
        if not hasattr(self, "kept"):
            super().prepare(batch)
            self.kept = batch.attn_metadata
        batch.attn_metadata = self.kept


# What it does to its arguments.


class ScalesTheQueryInPlace(Broken):
    def spoil_query(self, q: Tensor) -> Tensor:
        return q.mul_(1.0625).div(1.0625)


class TakesInputsForPacked(Broken):
    def spoil_query(self, q: Tensor) -> Tensor:
        return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))


class MixesUpNeighbours(Broken):
    """Answers with the mean over the batch, which is right for a batch of one."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        out = super().forward(q, k, v, layer, batch, sinks=sinks)
        return out if batch.batch_size == 1 else out.lerp(out.mean(0, keepdim=True), 1e-3)


class ForgetsIdleBatches(Broken):
    def prepare(self, batch: ForwardBatch) -> None:
        batch.seq_lens_cpu.max()
        super().prepare(batch)


class NeedsALayer(Broken):
    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self._plan(self.ctx.layers[0], batch)


# Capabilities that are not declared.


class Refusing(Broken):
    """Declares none, and says so when one is asked for."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        used: dict[str, object] = {"chunked_attention": layer.chunked or None, "sliding_window": layer.window}
        used |= {"logit_cap": layer.logit_cap, "sinks": sinks}
        used |= {"tree_mask": batch.tail_lens, "kv_fp8": self.ctx.kv_dtype}
        for name, value in used.items():
            if value is not None:
                self.refuse(name)
        return super().forward(q, k, v, layer, batch, sinks=sinks)

    def refuse(self, name: str) -> None:
        raise Unsupported("refusing", name)


class SilentlyComputesAnyway(Refusing):
    def refuse(self, name: str) -> None:
        pass


def caught(factory: type[Any], caught_by: str, **more: Any) -> Mutant:
    return Mutant(factory, suite=AttentionContract, caught_by=caught_by, **{"base": TorchAttention, **more})


NONE: dict[str, Any] = {"base": Refusing, "provides": frozenset()}

MUTANTS = [
    caught(SeesTheNextToken, "test_extend_behind_prefix"),
    caught(MissesItself, "test_decode"),
    caught(WindowTooWide, "test_window"),
    caught(IgnoresTheWindowInDecode, "test_window"),
    caught(IgnoresThePrefix, "test_extend_behind_prefix"),
    caught(LimitedToABlock, "test_long"),
    caught(OwnScale, "test_scale"),
    caught(NoCap, "test_logit_cap"),
    caught(CapsTheScoresUnscaled, "test_logit_cap"),
    caught(NoSinks, "test_sinks"),
    caught(NoSinks, "test_window_cap_and_sinks"),
    caught(InterleavesHeads, "test_grouped_heads"),
    caught(SoftmaxOverflows, "test_large_scores"),
    caught(ComputesInHalf, "test_extend"),
    caught(AnswersInFloat32, "test_dtypes"),
    caught(ReadsPadding, "test_reads_only_own_slots"),
    caught(TakesPagesForConsecutive, "test_page_sizes"),
    caught(ReadsNeighboursRow, "test_mixed"),
    caught(TakesRowsInOrder, "test_decodes_as_mixed"),
    caught(WritesOneSlotOff, "test_writes_only_new_slots"),
    caught(WritesToPageZeroToo, "test_writes_only_new_slots"),
    caught(WritesSharedKV, "test_shared_kv"),
    caught(KnowsOneGroup, "test_kv_groups"),
    caught(ReadsBehindTheWindow, "test_pages_behind_a_window_are_not_read"),
    caught(KnowsOneLayer, "test_layers_of_a_batch"),
    caught(KnowsOneWindow, "test_windows_of_a_batch"),
    caught(WindowTooWide, "test_long_window"),
    caught(KeepsTheFirstPlan, "test_steps"),
    caught(ScalesTheQueryInPlace, "test_leaves_its_inputs_alone"),
    caught(TakesInputsForPacked, "test_strided_inputs"),
    caught(InterleavesHeads, "test_head_dims"),
    caught(MixesUpNeighbours, "test_neighbours_do_not_matter"),
    caught(ForgetsIdleBatches, "test_idle_batch"),
    caught(NeedsALayer, "test_no_layers"),
    caught(IgnoresThePrefix, "test_any_batch"),
    caught(SilentlyComputesAnyway, "test_window_is_refused", **NONE),
    caught(SilentlyComputesAnyway, "test_logit_cap_is_refused", **NONE),
    caught(SilentlyComputesAnyway, "test_sinks_are_refused", **NONE),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


SUITES_APART = (
    AttentionTreeTests,
    AttentionFixedTests,
    AttentionFixedExtendTests,
    AttentionEightBitTests,
    AttentionPrefixTests,
    AttentionLatentTests,
    AttentionChunkTests,
)


def test_every_test_has_a_mutant() -> None:
    """But those that run on a GPU or in the whole matrices only. Mutants of trees, and of graphs, 8 bits, shared
    prefixes, latents and chunks, have files of their own.
    """
    elsewhere = {"test_matrix", "test_any_larger_batch", "test_any_batch_on_gpu"}
    for suite in SUITES_APART:
        elsewhere |= {name for name in vars(suite) if name.startswith("test")}
    assert set(AttentionContract._suite_tests) - {mutant.caught_by for mutant in MUTANTS} == elsewhere
