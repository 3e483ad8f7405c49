"""Attention backends that are wrong in graphs, in 8 bits or about shared prefixes, each caught by the test of the suite
that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.attention.common_prefix import AttentionPrefixTests
from pegboard.conformance.attention.eight_bit import AttentionEightBitTests
from pegboard.conformance.attention.fixed import AttentionFixedTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.toolkit.model.eight_bit import as_bytes
from tests.mutants.parted_attention import PARTS, PartedAttention
from tests.mutants.test_attention_mutants import NONE, Broken, SilentlyComputesAnyway, caught

Tensor = torch.Tensor

# In graphs.


class LeavesPadding(PartedAttention):
    """Writes down what the real requests are, and no more."""

    def prepare(self, batch: ForwardBatch) -> None:
        before = self.metadata(batch)
        super().prepare(batch)
        if before is not None and batch.fixed:
            for kept, old in zip(batch.attn_metadata, before, strict=True):
                kept[batch.real_size :] = old[batch.real_size :]

    def metadata(self, batch: ForwardBatch) -> list[Tensor] | None:
        return None if batch.attn_metadata is None else [one.clone() for one in batch.attn_metadata]


class MakesNewBuffers(PartedAttention):
    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        rows, seen = batch.attn_metadata
        batch.attn_metadata = rows.clone(), seen.clone()


class KeepsOneSize(PartedAttention):
    """Has buffers for the last size only."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        kept = getattr(self, "kept", None)
        if batch.fixed and (kept is None or len(kept[0]) != batch.batch_size):
            kept = self.kept = tuple(one.clone() for one in batch.attn_metadata)
        if batch.fixed:
            assert kept is not None
            for one, new in zip(kept, batch.attn_metadata, strict=True):
                one.copy_(new)
            batch.attn_metadata = kept


class FreezesTheSplit(PartedAttention):
    """Cuts by the lengths that the host knows of when it captures."""

    def sizes(self, seen: Tensor, batch: ForwardBatch) -> Tensor:
        return torch.full_like(seen, -(-int(batch.seq_lens_cpu.max()) // PARTS))


class WindowOffByOne(PartedAttention):
    def width(self, window: int) -> int:
        return window + 1


class LendsItsBuffers(PartedAttention):
    """All batches use one buffer, which grows where more requests come."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        kept, count = getattr(self, "kept", None), len(batch.attn_metadata[0])
        if kept is None or len(kept[0]) < count:
            kept = self.kept = tuple(torch.empty_like(one) for one in batch.attn_metadata)
        for one, new in zip(kept, batch.attn_metadata, strict=True):
            one[:count] = new
        batch.attn_metadata = tuple(one[:count] for one in kept)


class ForgetsScalesInParts(PartedAttention):
    def scales(self, pool: KVPool, layer: LayerSpec) -> tuple[float, float]:
        return (1.0, 1.0)


# In 8 bits.


class Unscaled(KVPool):
    """A pool as another one, but for what a subclass says."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        raise NotImplementedError

    def keys(self, layer_id: int) -> Tensor:
        return self.pool.keys(layer_id)

    def values(self, layer_id: int) -> Tensor:
        return self.pool.values(layer_id)

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.pool.write(layer_id, slots, k, v)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def scales(self, layer_id: int) -> tuple[float, float]:
        return (1.0, 1.0)


class Swapped(Unscaled):
    def scales(self, layer_id: int) -> tuple[float, float]:
        k, v = self.pool.scales(layer_id)
        return v, k


class KeysScale(Unscaled):
    def scales(self, layer_id: int) -> tuple[float, float]:
        k, _ = self.pool.scales(layer_id)
        return k, k


class FirstScales(Unscaled):
    def scales(self, layer_id: int) -> tuple[float, float]:
        return self.pool.scales(0)


class Flushed(Unscaled):
    """Without subnormal numbers."""

    def scales(self, layer_id: int) -> tuple[float, float]:
        return self.pool.scales(layer_id)

    def values(self, layer_id: int) -> Tensor:
        values = self.pool.values(layer_id)
        small = values.float().abs() < torch.finfo(values.dtype).smallest_normal
        return as_bytes(values).masked_fill(small, 0).view(values.dtype)


class WithoutNaN(Flushed):
    """The code of NaN as the number that it would be if it was one."""

    def values(self, layer_id: int) -> Tensor:
        values = self.pool.values(layer_id)
        return as_bytes(values).masked_fill(values.float().isnan(), 0x7B).view(values.dtype)


class InOtherPool(Broken):
    """Reads another pool than there is."""

    other: type[Unscaled] = Unscaled

    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, kv_pool=self.other(batch.kv_pool))


class ForgetsScales(InOtherPool):
    pass


class SwapsScales(InOtherPool):
    other = Swapped


class TakesKeysScale(InOtherPool):
    other = KeysScale


class TakesTheFirstScales(InOtherPool):
    other = FirstScales


class FlushesSubnormals(InOtherPool):
    other = Flushed


class TakesNaNForANumber(InOtherPool):
    other = WithoutNaN


# Of shared prefixes.


class CountsTwice(PartedAttention):
    def start(self, common: int) -> int:
        return 0


class TakesLogsForNatural(PartedAttention):
    def weights(self, tops: Tensor) -> Tensor:
        return tops.softmax(0)


class KeepsTheFirstPrefix(PartedAttention):
    """Whatever the next batch shares."""

    def common(self, batch: ForwardBatch) -> int:
        self.kept: int = getattr(self, "kept", batch.common_prefix)
        return self.kept if batch.common_prefix else 0

    def start(self, common: int) -> int:
        return self.last

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self.last = batch.common_prefix


class ForgetsTheRest(PartedAttention):
    """What stands behind the prefix has no weight where there are few requests."""

    def together(self, parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
        few = len(parts) > PARTS and len(parts[0][0]) == 1
        return super().together(parts[:1] if few else parts, sinks)


class SharesWindows(PartedAttention):
    """Has all see the prefix through the first request's window."""

    def part(
        self, q: Tensor, slots: Tensor, mask: Tensor, layer: LayerSpec, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        shared = len(slots) > 1 and slots.stride(0) == 0
        return super().part(q, slots, mask[:1].expand_as(mask) if shared else mask, layer, batch)


class SkipsThePrefix(SilentlyComputesAnyway):
    def spoil_batch(self, batch: ForwardBatch) -> ForwardBatch:
        common = batch.common_prefix
        tables = [replace(one, row_table=one.row_table[:, common:]) for one in batch.kv_groups]
        lens, cpu = batch.seq_lens - common, batch.seq_lens_cpu - common
        return replace(batch, kv_groups=tuple(tables), seq_lens=lens, seq_lens_cpu=cpu)


def parted(factory: type[Any], caught_by: str) -> Mutant:
    return caught(factory, caught_by, base=PartedAttention, provides=PartedAttention.PROVIDES)


MUTANTS = [
    parted(LeavesPadding, "test_fixed_padding"),
    parted(MakesNewBuffers, "test_fixed_lengths"),
    parted(KeepsOneSize, "test_fixed_sizes"),
    parted(FreezesTheSplit, "test_fixed_lengths"),
    parted(WindowOffByOne, "test_fixed_layers"),
    parted(LendsItsBuffers, "test_fixed_between_others"),
    parted(ForgetsScalesInParts, "test_fixed_eight_bit"),
    caught(ForgetsScales, "test_eight_bit"),
    caught(TakesKeysScale, "test_eight_bit_in_half"),
    caught(SwapsScales, "test_each_layer_has_its_scales"),
    caught(TakesTheFirstScales, "test_each_layer_has_its_scales"),
    caught(FlushesSubnormals, "test_every_number"),
    caught(TakesNaNForANumber, "test_nan_stays_nan"),
    caught(ForgetsScales, "test_eight_bit_trees"),
    caught(SilentlyComputesAnyway, "test_eight_bit_is_refused", **NONE),
    parted(CountsTwice, "test_common_prefix"),
    parted(TakesLogsForNatural, "test_common_prefix_has_most_of_the_weight"),
    parted(TakesLogsForNatural, "test_common_prefix_or_not"),
    parted(KeepsTheFirstPrefix, "test_common_prefix_or_not"),
    parted(SharesWindows, "test_common_prefix_over_layers"),
    parted(ForgetsTheRest, "test_common_prefix_of_one"),
    caught(SkipsThePrefix, "test_common_prefix_changes_nothing", **NONE),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    """But those that run in the whole matrices only."""
    suites = AttentionFixedTests, AttentionEightBitTests, AttentionPrefixTests
    own = {name for suite in suites for name in vars(suite) if name.startswith("test")}
    assert {name for name in own if not name.endswith("_matrix")} == {mutant.caught_by for mutant in MUTANTS}
