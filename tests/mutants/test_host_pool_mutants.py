"""Broken host pools, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.plugins.kv_tiers.suite.host_pool import HostPoolContract
from pegboard.plugins.memory_host.buffer import Part, records_of
from pegboard.plugins.memory_host.copies import Copies, DirectCopies
from pegboard.plugins.memory_host.pool import LayerFirst, PageFirst

Tensor = torch.Tensor


class CountsKeysTwice(LayerFirst):
    """As if V were like K."""

    @classmethod
    def bytes_per_token(cls, layers: Any, dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(2 * layer.num_kv_heads * layer.qk_head_dim for layer in layers)


class PromisesTooMuch(LayerFirst):
    """Page 0 is provided for, too, but is not one to be used."""

    def prepare(self, seconds: float) -> int:
        return super().prepare(seconds) + 1


class UsesWhatIsProvided(LayerFirst):
    """And nothing else."""

    def prepare(self, seconds: float) -> int:
        self.num_pages = super().prepare(seconds)
        return self.num_pages


class SavesInOrder(LayerFirst):
    """Of the host's pages, because neighbours are faster."""

    def save(self, pool: KVPool, device: Tensor, host: Tensor) -> None:
        super().save(pool, device, host.sort().values)


class LoadsFirstSlots(LayerFirst):
    """Takes pages for slots, which is right for pages of one."""

    def load(self, pool: KVPool, layer_id: int, host: Tensor, device: Tensor) -> None:
        kept = [one(layer_id).view(torch.uint8).clone() for one in (pool.keys, pool.values)]
        super().load(pool, layer_id, host, device)
        for old, one in zip(kept, (pool.keys, pool.values), strict=True):
            slots = (device[:, None] * self.page_size + torch.arange(1, self.page_size)).flatten()
            one(layer_id).view(torch.uint8)[slots] = old[slots]


class CopiesNumbers(LayerFirst):
    """In float32, as a cast would."""

    def load(self, pool: KVPool, layer_id: int, host: Tensor, device: Tensor) -> None:
        super().load(pool, layer_id, host, device)
        keys = pool.keys(layer_id)
        keys.copy_(keys.float().nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf).to(keys.dtype))


class RoundsUp(LayerFirst):
    """To an even number of pages."""

    def save(self, pool: KVPool, device: Tensor, host: Tensor) -> None:
        super().save(pool, device, host)
        for part in self.parts[pool.layer_ids[0]]:
            part.records[int(host.max()) % self.num_pages + 1] = np.zeros((), part.records.dtype)


class LoadsAllLayers(LayerFirst):
    def load(self, pool: KVPool, layer_id: int, host: Tensor, device: Tensor) -> None:
        for layer in self.layers:
            super().load(pool, layer.layer_id, host, device)


class WantsPages(LayerFirst):
    def save(self, pool: KVPool, device: Tensor, host: Tensor) -> None:
        assert host.min() > 0
        super().save(pool, device, host)


class SortsItsArguments(LayerFirst):
    def load(self, pool: KVPool, layer_id: int, host: Tensor, device: Tensor) -> None:
        host.copy_(host.sort().values)
        super().load(pool, layer_id, host, device)


class LayersByNumber(PageFirst):
    """And not in the context's order."""

    def lay_out(self) -> dict[int, tuple[Part, ...]]:
        return dict(sorted(super().lay_out().items()))


class PageAfterPage(PageFirst):
    """In a block of several, as in memory."""

    def write_block(self, host: Tensor, out: memoryview) -> None:
        out[:] = self.pages[host].numpy().tobytes()


class ReadsBackwards(LayerFirst):
    def read_block(self, data: memoryview, host: Tensor) -> None:
        super().read_block(data, host.flip(0))


class WritesWhatItReads(LayerFirst):
    def read_block(self, data: memoryview, host: Tensor) -> None:
        torch.frombuffer(data, dtype=torch.uint8)[:0] = 0
        assert not data.readonly
        super().read_block(data, host)


class ShowsNeighbours(PageFirst):
    """Which lie together, but are no block."""

    def view_block(self, host: Tensor) -> memoryview | None:
        if bool((host.diff() == 1).all()):
            return self.pages[int(host[0]) : int(host[-1]) + 1].numpy().reshape(-1).data
        return None


class ShowsACopy(LayerFirst):
    def view_block(self, host: Tensor) -> memoryview | None:
        out = memoryview(bytearray(self.block_bytes))
        self.write_block(host, out)
        return out


class OneScratch(LayerFirst):
    """For all calls, because memory is dear."""

    def make_copies(self, device: torch.device) -> Copies:
        return ScratchCopies()


class ScratchCopies(DirectCopies):
    def __init__(self) -> None:
        self.scratch = np.zeros(2**16, np.uint8)

    def save(self, buffer: Tensor, device: Any, part: Part, host: Any) -> None:
        records = records_of(buffer.view(torch.uint8).view(-1, part.page_bytes))[device]
        scratch = self.scratch[: records.nbytes].view(records.dtype)
        scratch[:] = records
        time.sleep(1e-3)
        part.records[host] = scratch


class SavesOnce(LayerFirst):
    """What is there already: a page that has been given to another prefix keeps its first one's KV."""

    def save(self, pool: KVPool, device: Tensor, host: Tensor) -> None:
        saved: set[int] = vars(self).setdefault("saved", set())
        new = torch.tensor([page not in saved for page in host.tolist()], dtype=torch.bool)
        super().save(pool, device[new], host[new])
        saved.update(host.tolist())


MUTANTS = [
    Mutant(factory, suite=HostPoolContract, caught_by=test)
    for factory, test in (
        (CountsKeysTwice, "test_bytes_are_known_before_and_after"),
        (PromisesTooMuch, "test_prepare"),
        (UsesWhatIsProvided, "test_prepare"),
        (SavesInOrder, "test_what_was_saved_is_loaded"),
        (LoadsFirstSlots, "test_what_was_saved_is_loaded"),
        (CopiesNumbers, "test_no_bit_is_a_number"),
        (RoundsUp, "test_only_named_host_pages_change"),
        (LoadsAllLayers, "test_one_layer_is_loaded"),
        (WantsPages, "test_no_pages_are_fine"),
        (SortsItsArguments, "test_arguments_stay"),
        (LayersByNumber, "test_blocks_have_one_format"),
        (PageAfterPage, "test_blocks_have_one_format"),
        (ReadsBackwards, "test_blocks_are_read"),
        (WritesWhatItReads, "test_blocks_are_read"),
        (ShowsNeighbours, "test_a_view_is_the_block"),
        (ShowsACopy, "test_a_view_is_the_block"),
        (OneScratch, "test_calls_beside_each_other"),
        (SavesOnce, "test_any_sequence_of_calls"),
        (ReadsBackwards, "test_any_sequence_of_calls"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    own = {name for name in vars(HostPoolContract) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
