"""Tests of layers in several KV groups, each of which has pages of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.kv_pool import KVPoolContext

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool

GROUPS = (make_layer(4, 2, 8), make_layer(4, 2, 8, layer_id=1, kv_group=1), make_layer(4, 1, 8, layer_id=2, kv_group=2))
PAGES, FURTHER, PAGE = 5, (3, 1), 4


class KVPoolGroupTests(ContractSuite):
    """A subclass has the fixture `device`."""

    def groups(self, device: torch.device) -> KVPool:
        """Return a pool of GROUPS."""
        ctx = KVPoolContext(PAGES, PAGE, GROUPS, torch.float32, device, further_pages=FURTHER)
        pool: KVPool = self.build(ctx)
        return pool

    def test_each_group_has_its_pages(self, device: torch.device) -> None:
        """And page 0: that is what the pipeline counts on when it shares memory between groups."""
        pool = self.groups(device)
        assert pool.num_slots == (PAGES + 1) * PAGE
        slots = [(pages + 1) * PAGE for pages in (PAGES, *FURTHER)]
        for layer, count in zip(GROUPS, slots, strict=True):
            for buffer in (pool.keys(layer.layer_id), pool.values(layer.layer_id)):
                assert tuple(buffer.shape) == (count, layer.num_kv_heads, 8), f"layer {layer.layer_id}"
                assert bool(buffer[:PAGE].isfinite().all())
        sizes = [self.provider_class().bytes_per_token((layer,), torch.float32) for layer in GROUPS]
        assert pool.nbytes == sum(size * count for size, count in zip(sizes, slots, strict=True))

    def test_all_slots_of_all_groups_can_be_written(self, device: torch.device) -> None:
        pool = self.groups(device)
        assert pool.prepare(60.0) == pool.num_slots
        for layer in GROUPS:
            keys, values = pool.keys(layer.layer_id), pool.values(layer.layer_id)
            k, v = torch.randn_like(keys), torch.randn_like(values)
            pool.write(layer.layer_id, torch.arange(len(keys), device=device), k, v)
            assert torch.equal(keys, k)
            assert torch.equal(values, v)
