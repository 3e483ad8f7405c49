"""A layer's keys and values as the kernels take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.toolkit.model.eight_bit import EIGHT_BIT, as_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

LOG2E = math.log2(math.e)
_LEFT_OUT = {1: 256.0, 3: 256.0}
"""The factor of all numbers that the kernels leave out where they widen 8 bits, by their KV; of others 1."""


def widenings(capability: tuple[int, int] | None) -> dict[torch.dtype, int]:
    """Return the kernels' KV by types of 8 bits, see `widening.widen`: for a device of this compute capability, or None
    for the interpreter. Numbers of other types, with KV 0, are taken as they are.
    """
    e4m3, e5m2 = EIGHT_BIT
    if capability is None:
        return {e4m3: 1, e5m2: 2}
    return {e4m3: 5 if capability >= (8, 9) else 3, e5m2: 4}


@dataclass(frozen=True, slots=True)
class Stored:
    """A layer's keys and values as they lie in the pool, in bytes where they are of 8 bits, with the row table, and the
    kernels' `scale`, `cap` and `v_scale`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    factors: tuple[float, float, float]
    kv: int

    @classmethod
    def of(
        cls, layer: LayerSpec, num_kv_heads: int, batch: ForwardBatch, widenings: Mapping[torch.dtype, int]
    ) -> Stored:
        """Return a layer's KV, with so many KV heads: a latent one has one, which stands for all of them."""
        keys, values = batch.kv_pool.keys(layer.layer_id), batch.kv_pool.values(layer.layer_id)
        if layer.latent:
            keys, values = keys.expand(-1, num_kv_heads, -1), values.expand(-1, num_kv_heads, -1)
        table = batch.kv_groups[layer.kv_group].row_table
        kv = widenings.get(keys.dtype, 0)
        if not kv:
            return cls(keys, values, table, (*_factors(layer, 1.0), 1.0), kv)
        k_scale, v_scale = (scale * _LEFT_OUT.get(kv, 1.0) for scale in batch.kv_pool.scales(layer.layer_id))
        return cls(as_bytes(keys), as_bytes(values), table, (*_factors(layer, k_scale), v_scale), kv)


def _factors(layer: LayerSpec, k_scale: float) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, see `kernel_parts.scores`."""
    scale = layer.scale * k_scale
    if layer.logit_cap is None:
        return scale * LOG2E, 0.0
    return 2.0 * LOG2E * scale / layer.logit_cap, LOG2E * layer.logit_cap
