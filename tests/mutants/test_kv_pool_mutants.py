"""Broken KV pools, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.conformance.kv_pool import KVPoolContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.memory_paged.pool import MHAPool

Tensor = torch.Tensor


class ForgetsPageZero(MHAPool):
    """As if padding had none."""

    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self.num_slots -= ctx.page_size


class KeepsHeadsFirst(MHAPool):
    def keys(self, layer_id: int) -> Tensor:
        keys = super().keys(layer_id)
        return keys.transpose(0, 1).contiguous().transpose(0, 1)


class CountsKeysOnly(MHAPool):
    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(2 * layer.num_kv_heads * layer.qk_head_dim for layer in layers)


class GivesCopies(MHAPool):
    def values(self, layer_id: int) -> Tensor:
        return super().values(layer_id).clone()


class SharesValues(MHAPool):
    """Of layers that look alike."""

    def _buffer(self, heads: int, dim: int, ctx: KVPoolContext) -> Tensor:
        self.known = getattr(self, "known", {})
        return self.known.setdefault((heads, dim), super()._buffer(heads, dim, ctx))


class BeginsWithAnything(MHAPool):
    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        for layer in ctx.layers:
            self.values(layer.layer_id).fill_(torch.nan)


class PreparesWithNaN(MHAPool):
    def prepare(self, seconds: float) -> int:
        for layer_id in self.layer_ids:
            self.keys(layer_id).fill_(torch.nan)
        return super().prepare(seconds)


class PromisesTooMuch(MHAPool):
    def prepare(self, seconds: float) -> int:
        return super().prepare(seconds) + self.page_size


class WritesOneSlotOff(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots.roll(1), k, v)


class WritesToTheNextPageToo(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots, k, v)
        if len(slots) < self.num_slots and len(slots):
            self.values(layer_id)[(slots + self.page_size) % self.num_slots] = 0


class ScalesItsArguments(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots, k, v)
        k.zero_()


class TakesRowsForNeighbours(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        packed = k.shape[1] * k.shape[2], k.shape[2], 1
        super().write(layer_id, slots, k.as_strided(k.shape, packed), v)


class MovesKeysAlone(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        for layer_id in self.layer_ids:
            self.keys(layer_id)[targets] = self.keys(layer_id)[sources]


class CountsLayersFromZero(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        self.layer_ids = tuple(one for one in range(len(self.layer_ids)) if one in self._keys)
        super().move(sources, targets)


class TakesInsteadOfCopying(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        super().move(sources, targets)
        left = sources[~torch.isin(sources, targets)]
        for layer_id in self.layer_ids:
            self.keys(layer_id)[left] = 0


class MovesOneByOne(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        for source, target in zip(sources, targets, strict=True):
            super().move(source[None], target[None])


class MovesFromTheEnd(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        for source, target in zip(sources.flip(0), targets.flip(0), strict=True):
            super().move(source[None], target[None])


MUTANTS = [
    Mutant(factory, suite=KVPoolContract, caught_by=test)
    for factory, test in (
        (ForgetsPageZero, "test_buffers_have_the_shape_of_their_layers"),
        (KeepsHeadsFirst, "test_buffers_have_the_shape_of_their_layers"),
        (CountsKeysOnly, "test_bytes_are_known_before_and_after"),
        (GivesCopies, "test_buffers_are_no_copies"),
        (SharesValues, "test_layers_have_memory_of_their_own"),
        (BeginsWithAnything, "test_page_zero_begins_finite"),
        (PreparesWithNaN, "test_prepare"),
        (PromisesTooMuch, "test_prepare"),
        (WritesOneSlotOff, "test_a_write_reaches_its_slots_alone"),
        (WritesToTheNextPageToo, "test_a_write_reaches_its_slots_alone"),
        (ScalesItsArguments, "test_a_write_leaves_its_arguments_alone"),
        (TakesRowsForNeighbours, "test_views_are_written"),
        (MovesKeysAlone, "test_moves"),
        (CountsLayersFromZero, "test_moves"),
        (TakesInsteadOfCopying, "test_moves"),
        (MovesOneByOne, "test_all_sources_are_read_first"),
        (MovesFromTheEnd, "test_all_sources_are_read_first"),
        (MovesOneByOne, "test_any_move"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    own = {name for name in vars(KVPoolContract) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
