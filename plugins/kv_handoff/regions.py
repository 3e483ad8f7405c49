"""The buffers of a KV pool, as engines that move KV see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.plugins.kv_handoff.api.transfer import Region

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool


def regions_of(pool: KVPool) -> tuple[Region, ...]:
    """Return the buffers of a pool: K, then V of each layer (of a latent one K alone), in the order of its layers."""
    return tuple(_region(buffer) for layer_id in pool.layer_ids for buffer in pool.buffers(layer_id))


def _region(buffer: torch.Tensor) -> Region:
    """Describe [slots, heads, dim], contiguous."""
    slots, heads, _ = buffer.shape
    if not buffer.is_contiguous():
        raise ValueError("a buffer of the KV pool is not contiguous")
    on_host = buffer.device.type == "cpu"
    return Region(
        address=buffer.data_ptr(),
        nbytes=buffer.nbytes,
        slot_bytes=buffer.nbytes // slots,
        heads=heads,
        device=str(buffer.device),
        buffer=buffer.view(torch.uint8).view(-1).numpy().data if on_host else None,
    )
