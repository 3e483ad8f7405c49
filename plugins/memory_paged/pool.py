"""The KV pool of multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pegboard.core.interfaces.kv_pool import KVPool

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPoolContext
    from pegboard.core.interfaces.layers import LayerSpec


class MHAPool(KVPool):
    """One K and one V buffer per layer. Layers may differ in their heads and head sizes.

    The memory is not cleared (free slots are undefined by contract) but for page 0: padding rows may read what padding
    rows wrote there, and should not start from NaN.
    """

    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for layer in ctx.layers:
            if layer.layer_id in self._keys:
                raise ValueError(f"two layers have the id {layer.layer_id}")
            self._keys[layer.layer_id] = self._buffer(layer.num_kv_heads, layer.qk_head_dim, ctx)
            self._values[layer.layer_id] = self._buffer(layer.num_kv_heads, layer.v_head_dim, ctx)

    def _buffer(self, heads: int, dim: int, ctx: KVPoolContext) -> torch.Tensor:
        buffer = torch.empty((self.num_slots, heads, dim), dtype=ctx.dtype, device=ctx.device)
        buffer[: self.page_size] = 0
        return buffer

    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim) for layer in layers)

    def keys(self, layer_id: int) -> torch.Tensor:
        return self._keys[layer_id]

    def values(self, layer_id: int) -> torch.Tensor:
        return self._values[layer_id]

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._keys[layer_id], self._values[layer_id]
        # index_copy_ and not keys[slots] = k: it does not broadcast, so a wrong shape is an error.
        keys.index_copy_(0, slots, k.to(keys.dtype))
        values.index_copy_(0, slots, v.to(values.dtype))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys.values(), *self._values.values()))
