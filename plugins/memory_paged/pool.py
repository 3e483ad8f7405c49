"""The KV pool of multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.options import NoOptions
from pegboard.toolkit.model.eight_bit import as_bytes, check_scale, is_eight_bit, stored
from pegboard.toolkit.system.memory import give_back, large_buffer

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPoolContext
    from pegboard.core.interfaces.layers import LayerSpec


_PREPARED_AT_ONCE = 2**21
"""Bytes of each buffer."""


class MHAPool(KVPool[NoOptions]):
    """One K and one V buffer per layer, of latent layers one for both. Layers may differ in their heads and head sizes.

    The memory is not cleared (free slots are undefined by contract) but for layers that ask for it and for page 0:
    padding rows may read what padding rows wrote there, and should not start from NaN. Zeros are zeros in 8 bits, too.
    """

    def __init__(self, options: NoOptions, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self._eight_bit = is_eight_bit(ctx.dtype)
        self._scales: dict[int, tuple[float, float]] = {}
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for layer in ctx.layers:
            if layer.layer_id in self._keys:
                raise ValueError(f"two layers have the id {layer.layer_id}")
            keys = self._keys[layer.layer_id] = self._buffer(layer, layer.qk_head_dim, ctx)
            self._values[layer.layer_id] = (
                keys[..., : layer.v_head_dim] if layer.latent else self._buffer(layer, layer.v_head_dim, ctx)
            )
        for layer_id in ctx.zeroed:
            if ctx.device.type != "cpu":  # where all of it is zeros
                for buffer in self.buffers(layer_id):
                    buffer.zero_()

    def _buffer(self, layer: LayerSpec, dim: int, ctx: KVPoolContext) -> torch.Tensor:
        shape = ((ctx.pages_of(layer) + 1) * ctx.page_size, layer.num_kv_heads, dim)
        if ctx.device.type == "cpu":
            buffer = large_buffer(math.prod(shape) * ctx.dtype.itemsize).view(ctx.dtype).view(shape)
        else:
            buffer = torch.empty(shape, dtype=ctx.dtype, device=ctx.device)
        buffer[: self.page_size] = 0
        return buffer

    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(sum(layer.kept) for layer in layers)

    def keys(self, layer_id: int) -> torch.Tensor:
        return self._keys[layer_id]

    def values(self, layer_id: int) -> torch.Tensor:
        return self._values[layer_id]

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._keys[layer_id], self._values[layer_id]
        if self._eight_bit:
            k_scale, v_scale = self.scales(layer_id)
            k, v = as_bytes(stored(k, k_scale, keys.dtype)), as_bytes(stored(v, v_scale, values.dtype))
            keys, values = as_bytes(keys), as_bytes(values)
        # index_copy_ and not keys[slots] = k: it does not broadcast, so a wrong shape is an error.
        keys.index_copy_(0, slots, k.to(keys.dtype))
        if layer_id not in self._latent:
            values.index_copy_(0, slots, v.to(values.dtype))

    def scales(self, layer_id: int) -> tuple[float, float]:
        return self._scales.get(layer_id, (1.0, 1.0))

    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        if not self._eight_bit:
            super().set_scales(layer_id, k, v)
        if layer_id not in self._keys:
            raise ValueError(f"there is no layer {layer_id}")
        self._scales[layer_id] = check_scale(k), check_scale(v)

    def prepare(self, seconds: float) -> int:
        """On a CPU, write to all slots, the first ones first, since the allocators hand these out first."""
        buffers = self._all()
        if not buffers or buffers[0].device.type != "cpu":
            return self.num_slots
        widest = max(buffer[0].nbytes for buffer in buffers)
        step, done, end = max(1, _PREPARED_AT_ONCE // widest), 0, time.monotonic() + seconds
        while done < self.num_slots and time.monotonic() < end:
            for buffer in buffers:
                buffer[done : done + step] = 0
            done = min(self.num_slots, done + step)
        return done

    def release(self) -> int:
        buffers = self._all()
        if buffers and buffers[0].device.type != "cpu":
            raise Unsupported("the KV pool 'mha'", "release", "on a GPU recorded graphs hold on to its memory")
        return sum(give_back(buffer) for buffer in buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._all())

    def _all(self) -> list[torch.Tensor]:
        return [buffer for layer_id in self.layer_ids for buffer in self.buffers(layer_id)]
