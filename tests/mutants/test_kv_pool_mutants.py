"""Broken KV pools, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import math
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

    def _buffer(self, layer: LayerSpec, dim: int, ctx: KVPoolContext) -> Tensor:
        self.known = getattr(self, "known", {})
        return self.known.setdefault((layer.num_kv_heads, dim), super()._buffer(layer, dim, ctx))


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


class BeginsWithAScaleOfItsOwn(MHAPool):
    def scales(self, layer_id: int) -> tuple[float, float]:
        return self._scales.get(layer_id, (0.5, 0.5))


class TakesTheScaleOfAnotherLayer(MHAPool):
    def scales(self, layer_id: int) -> tuple[float, float]:
        return super().scales(self.layer_ids[0])


class TakesAnyScale(MHAPool):
    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        self._scales[layer_id] = k, v


class ScalesEverything(MHAPool):
    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        self._eight_bit = True
        super().set_scales(layer_id, k, v)


class Multiplies(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_scale, v_scale = self.scales(layer_id)
        super().write(layer_id, slots, k * k_scale**2, v * v_scale**2)


class WritesWithTheFirstLayersScale(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        (k_scale, v_scale), (first_k, first_v) = self.scales(layer_id), self.scales(self.layer_ids[0])
        super().write(layer_id, slots, k * (k_scale / first_k), v * (v_scale / first_v))


class ScalesValuesAsKeys(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_scale, v_scale = self.scales(layer_id)
        super().write(layer_id, slots, k, v * (v_scale / k_scale))


class RoundsTheScale(MHAPool):
    """To a power of two, as if all were."""

    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        super().set_scales(layer_id, *(2.0 ** round(math.log2(one)) if one > 0 else one for one in (k, v)))


class RoundsDown(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots, k * (1 - 2**-5), v)


class ClampsNothing(MHAPool):
    """Bytes are stored as numpy's casts of other libraries make them: what is too large is NaN."""

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        kept = self.keys(layer_id).dtype
        if kept.itemsize == 1:
            most, (k_scale, v_scale) = torch.finfo(kept).max, self.scales(layer_id)
            k = k.masked_fill((k / k_scale).abs() > most, torch.nan)
            v = v.masked_fill((v / v_scale).abs() > most, torch.nan)
        super().write(layer_id, slots, k, v)


class ClampsBeforeItScales(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        kept = self.keys(layer_id).dtype
        most = torch.finfo(kept).max
        super().write(layer_id, slots, k.clamp(-most, most), v.clamp(-most, most))


class LosesNaN(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots, k.nan_to_num(nan=0.0), v.nan_to_num(nan=0.0))


class MovesOtherTypesAlone(MHAPool):
    """As where index_copy_ of 8-bit floats is passed over."""

    def move(self, sources: Tensor, targets: Tensor) -> None:
        if self.keys(self.layer_ids[0]).dtype.itemsize > 1:
            super().move(sources, targets)


class NeedsALayer(MHAPool):
    def prepare(self, seconds: float) -> int:
        self.keys(self.layer_ids[0])
        return super().prepare(seconds)


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
        (BeginsWithAScaleOfItsOwn, "test_scales_are_one_at_first"),
        (TakesTheScaleOfAnotherLayer, "test_scales_are_those_that_were_set"),
        (TakesAnyScale, "test_wrong_scales_are_refused"),
        (ScalesEverything, "test_other_types_are_not_scaled"),
        (Multiplies, "test_a_write_is_scaled"),
        (WritesWithTheFirstLayersScale, "test_a_write_is_scaled"),
        (ScalesValuesAsKeys, "test_a_write_is_scaled"),
        (RoundsDown, "test_a_write_is_scaled"),
        (RoundsTheScale, "test_any_scale"),
        (ClampsNothing, "test_what_is_too_large_is_clamped"),
        (ClampsBeforeItScales, "test_what_is_too_large_is_clamped"),
        (LosesNaN, "test_what_is_too_large_is_clamped"),
        (MovesOtherTypesAlone, "test_moves"),
        (NeedsALayer, "test_no_layers"),
    )
]


class MovesAway(MHAPool):
    def release(self) -> int:
        self._keys = {one: keys.clone() for one, keys in self._keys.items()}
        return self.nbytes


class GivesHalfBack(MHAPool):
    def release(self) -> int:
        return super().release() // 2


class LeavesNaN(MHAPool):
    def release(self) -> int:
        for buffer in self._all():
            buffer.fill_(math.nan)
        return self.nbytes


@pytest.mark.parametrize("cls", [MovesAway, GivesHalfBack, LeavesNaN])
def test_releasing_is_tested(cls: type[MHAPool]) -> None:
    assert_caught(Mutant(cls, suite=KVPoolContract, caught_by="test_memory_is_given_back"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    own = {name for name in vars(KVPoolContract) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
