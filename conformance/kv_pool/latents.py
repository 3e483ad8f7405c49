"""Tests of layers that keep a latent: one buffer, of which values are a view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.suite import ContractSuite

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec

LATENTS = (make_layer(6, 1, 12, 8, latent=True), make_layer(4, 2, 8, layer_id=2))
"""A latent layer beside another one."""


class KVPoolLatentTests(ContractSuite):
    """A subclass has `make` and the fixture `device`."""

    def make(self, device: torch.device, dtype: torch.dtype, layers: tuple[LayerSpec, ...]) -> KVPool:
        """Return a pool of these layers."""
        raise NotImplementedError

    def latents(self, device: torch.device, dtype: torch.dtype) -> tuple[KVPool, torch.Tensor]:
        """Return a pool of LATENTS, and what all slots of the latent layer hold."""
        pool = self.make(device, dtype, LATENTS)
        kept = torch.randn(pool.num_slots, 1, 12, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
        wrong = torch.full((pool.num_slots, 1, 8), 7.0, dtype=dtype, device=device)
        pool.write(0, torch.arange(pool.num_slots, device=device), kept, wrong)
        return pool, kept

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_latents_are_kept_once(self, dtype: torch.dtype, device: torch.device) -> None:
        """Values are the first numbers of the keys, whatever is written as values."""
        pool, kept = self.latents(device, dtype)
        assert torch.equal(pool.keys(0), kept)
        assert torch.equal(pool.values(0), kept[..., :8])
        assert pool.keys(0).is_contiguous()
        assert pool.values(0).data_ptr() == pool.keys(0).data_ptr(), "values are not a view of the keys"
        assert [len(pool.buffers(layer.layer_id)) for layer in LATENTS] == [1, 2]
        per_token = dtype.itemsize * (12 + 2 * (8 + 8))
        assert self.provider_class().bytes_per_token(LATENTS, dtype) == per_token
        assert pool.nbytes == per_token * pool.num_slots

    def test_latents_begin_finite(self, device: torch.device) -> None:
        pool = self.make(device, torch.float32, LATENTS)
        assert bool(pool.keys(0)[: pool.page_size].isfinite().all())
        assert pool.prepare(60.0) == pool.num_slots

    @pytest.mark.parametrize(
        ("sources", "targets"),
        [([5, 6, 7, 8], [4, 5, 6, 7]), ([4, 5, 6, 7], [5, 6, 7, 8]), ([4, 9], [9, 4]), ([20, 6], [4, 5])],
        ids=["down", "up", "swapped", "apart"],
    )
    def test_latents_are_moved_once(self, sources: Sequence[int], targets: Sequence[int], device: torch.device) -> None:
        """A second pass over the values would read what the first one has written."""
        pool, kept = self.latents(device, torch.float32)
        pool.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
        expected = kept.clone()
        expected[torch.tensor(targets, device=device)] = kept[torch.tensor(sources, device=device)]
        assert torch.equal(pool.keys(0), expected)
        assert torch.equal(pool.values(0), expected[..., :8])
