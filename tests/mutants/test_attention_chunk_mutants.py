"""Attention backends that are wrong about chunks, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.attention.chunks import AttentionChunkTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import LayerSpec
from tests.mutants.test_attention_mutants import (
    NONE,
    Broken,
    IgnoresThePrefix,
    NoSinks,
    ReadsBehindTheWindow,
    SilentlyComputesAnyway,
    caught,
)


class TakesThemForWindows(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, chunked=False)


class SeesAllKeys(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, chunked=False, window=None)


class CountsFromTheBatch(Broken):
    """The first new token of a request begins a chunk."""

    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.extend_lens_cpu is None:
            return batch
        return replace(batch, seq_lens_cpu=batch.extend_lens_cpu)


class TakesDecodesForWindows(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer

    def _decode(self, q: torch.Tensor, group: Any, layer: LayerSpec, batch: Any, sinks: Any) -> torch.Tensor:
        plan = self._plan(replace(layer, chunked=False), batch)
        return super()._decode(q, plan.decodes[0] if len(plan.decodes) == 1 else group, layer, batch, sinks)


class KeepsOnePlanForBoth(Broken):
    """Of chunks and windows of one size."""

    def _plan(self, layer: LayerSpec, batch: ForwardBatch) -> Any:
        same = [kind for kind in batch.attn_metadata if kind[:2] == (layer.kv_group, layer.window)]
        return batch.attn_metadata[sorted(same)[-1]]


class TakesTreesForWindows(Broken):
    def spoil_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer

    def _tree(self, q: torch.Tensor, span: Any, layer: LayerSpec, batch: Any, sinks: Any) -> torch.Tensor:
        trees = self._plan(replace(layer, chunked=False), batch).trees
        span = next(other for other in trees if other.start == span.start)
        return super()._tree(q, span, layer, batch, sinks)


MUTANTS = [
    caught(TakesThemForWindows, "test_chunks"),
    caught(TakesDecodesForWindows, "test_chunks"),
    caught(SeesAllKeys, "test_long_chunks"),
    caught(CountsFromTheBatch, "test_chunks_of_a_mixed_batch"),
    caught(IgnoresThePrefix, "test_chunks_of_a_mixed_batch"),
    caught(ReadsBehindTheWindow, "test_pages_before_a_chunk_are_not_read"),
    caught(KeepsOnePlanForBoth, "test_chunks_beside_windows"),
    caught(NoSinks, "test_chunks_with_cap_and_sinks"),
    caught(TakesTreesForWindows, "test_trees_in_chunks"),
    caught(SilentlyComputesAnyway, "test_chunks_are_refused", **NONE),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    wanted = {name for name in vars(AttentionChunkTests) if name.startswith("test")}
    assert wanted == {mutant.caught_by for mutant in MUTANTS}
