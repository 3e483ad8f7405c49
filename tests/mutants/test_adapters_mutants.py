"""Broken backends of adapters, and the tests of the suite that notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.adapters.api import AdapterWeights
from pegboard.plugins.adapters.suite import AdapterContract
from pegboard.plugins.lora_torch.backend import TorchAdapters, TorchAdditions


def changed(weights, change):
    return AdapterWeights({number: tuple(map(change, parts)) for number, parts in weights.sites.items()})


class ForgetsTheScale(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(changed(weights, lambda part: replace(part, scale=1.0)))


class HasOneScale(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(changed(weights, lambda part: replace(part, scale=0.5)))


class ScalesTwice(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(changed(weights, lambda part: replace(part, a=part.a * part.scale)))


class ScalesInPlace(TorchAdapters):
    def prepare(self, weights):
        for parts in weights.sites.values():
            for part in parts:
                part.b.mul_(part.scale)
        return super().prepare(changed(weights, lambda part: replace(part, scale=1.0)))


class StartsAtTheFirstRow(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(changed(weights, lambda part: replace(part, start=0)))


class TakesTheFirstPartOnly(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(AdapterWeights({number: parts[:1] for number, parts in weights.sites.items()}))


class CutsRanks(TorchAdapters):
    def prepare(self, weights):
        return super().prepare(changed(weights, lambda part: replace(part, a=part.a[:8], b=part.b[:, :8])))


class MixesSlots(TorchAdapters):
    def activate(self, slot, prepared):
        super().activate(slot % self.ctx.slots + 1, prepared)
        super().activate(slot, prepared)


class KeepsTheFirst(TorchAdapters):
    def activate(self, slot, prepared):
        if self._slots[slot] is None:
            super().activate(slot, prepared)


class AddsToWhatIsThere(TorchAdapters):
    def activate(self, slot, prepared):
        super().activate(slot, {**(self._slots[slot] or {}), **prepared})


class ClearsAll(TorchAdapters):
    def clear(self, slot):
        self._slots = [None] * len(self._slots)


class SlotZeroIsNotEmpty(TorchAdapters):
    def begin(self, slots, lens, put):
        return super().begin(np.maximum(slots, 1), lens, put)


class AlwaysHasSomething(TorchAdapters):
    def begin(self, slots, lens, put):
        return super().begin(slots, lens, put) or TorchAdditions([])


class OneTokenEach(TorchAdapters):
    def begin(self, slots, lens, put):
        return super().begin(slots, np.ones_like(lens), put)


class KeepsTheColumn(TorchAdapters):
    """A stale column: what the batch before had, where the sizes agree."""

    last = np.zeros(0, np.int64)

    def begin(self, slots, lens, put):
        if len(self.last) == len(slots):
            slots = self.last
        self.last = slots
        return super().begin(slots, lens, put)


class OneAdapterForAll(TorchAdapters):
    def begin(self, slots, lens, put):
        return super().begin(np.where(slots, slots.max(), 0), lens, put)


class SortsTheRequests(TorchAdapters):
    def begin(self, slots, lens, put):
        return super().begin(np.sort(slots), lens, put)


class LooksInTheSlotLate(TorchAdapters):
    def begin(self, slots, lens, put):
        backend, found = self, super().begin(slots, lens, put)

        class Late:
            def add(self, site, x, out):
                late = TorchAdapters.begin(backend, np.where(slots, 2, 0), lens, put)
                assert late is not None
                late.add(site, x, out)

        return found and Late()


class Wrapped(TorchAdapters):
    """`change` gets what the real one would add."""

    def begin(self, slots, lens, put):
        backend, found = self, super().begin(slots, lens, put)

        class Changed:
            def add(self, site, x, out):
                backend.add(found, site, x, out)

        return found and Changed()

    def add(self, found, site, x, out):
        found.add(site, x, out)


class WritesInsteadOfAdding(Wrapped):
    def add(self, found, site, x, out):
        out.zero_()
        found.add(site, x, out)


class AddsTwice(Wrapped):
    def add(self, found, site, x, out):
        found.add(site, x, out)
        found.add(site, x, out)


class TakesAnotherSite(Wrapped):
    def add(self, found, site, x, out):
        found.add(3 if site == 1 and x.shape[1] == 40 else site, x, out)
        if site == 3:
            out.add_(1.0)


class ChangesItsInput(Wrapped):
    def add(self, found, site, x, out):
        found.add(site, x, out)
        x.mul_(2.0)


class TakesRowsAsTheyLie(Wrapped):
    def add(self, found, site, x, out):
        flat = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
        found.add(site, flat, out)


class WritesACopy(Wrapped):
    def add(self, found, site, x, out):
        found.add(site, x, out.contiguous())


class TakesNothing(TorchAdapters):
    def host_bytes(self, prepared, matrices):
        return 0


class NegativeBytes(TorchAdapters):
    device_bytes = -1


CAUGHT = {
    ForgetsTheScale: "test_one_adapter",
    HasOneScale: "test_one_adapter",
    ScalesTwice: "test_one_adapter",
    ScalesInPlace: "test_the_weights_stay_as_they_are",
    StartsAtTheFirstRow: "test_one_adapter",
    TakesTheFirstPartOnly: "test_some_parts_with_ranks_of_their_own",
    CutsRanks: "test_some_parts_with_ranks_of_their_own",
    MixesSlots: "test_any_mix",
    KeepsTheFirst: "test_a_slot_gets_another_adapter",
    AddsToWhatIsThere: "test_a_slot_gets_another_adapter",
    ClearsAll: "test_one_adapter_in_two_slots",
    SlotZeroIsNotEmpty: "test_without_adapters_there_is_nothing_to_do",
    AlwaysHasSomething: "test_without_adapters_there_is_nothing_to_do",
    OneTokenEach: "test_one_adapter",
    KeepsTheColumn: "test_a_slot_gets_another_adapter",
    OneAdapterForAll: "test_any_mix",
    SortsTheRequests: "test_any_mix",
    LooksInTheSlotLate: "test_a_batch_under_way_keeps_what_it_began_with",
    WritesInsteadOfAdding: "test_one_adapter",
    AddsTwice: "test_one_adapter",
    TakesAnotherSite: "test_one_adapter",
    ChangesItsInput: "test_one_adapter",
    TakesRowsAsTheyLie: "test_rows_with_gaps",
    WritesACopy: "test_rows_with_gaps",
    NegativeBytes: "test_it_says_what_slots_take",
    TakesNothing: "test_it_says_what_an_adapter_takes",
}
MUTANTS = [Mutant(cls, suite=AdapterContract, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
