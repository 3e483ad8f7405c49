"""A layer's keys and values as the kernels take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.toolkit.model.eight_bit import as_bytes

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

LOG2E = math.log2(math.e)
EIGHT_BIT = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""The kernels' KV. Numbers of other types are taken as they are."""
_LEFT_OUT = {1: 256.0, 2: 1.0}
"""The factor of all numbers that the kernels leave out where they widen 8 bits, see `kernel_parts.widen`."""


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
    def of(cls, layer: LayerSpec, batch: ForwardBatch) -> Stored:
        keys, values = batch.kv_pool.keys(layer.layer_id), batch.kv_pool.values(layer.layer_id)
        table = batch.kv_groups[layer.kv_group].row_table
        kv = EIGHT_BIT.get(keys.dtype, 0)
        if not kv:
            return cls(keys, values, table, (*_factors(layer, 1.0), 1.0), kv)
        k_scale, v_scale = (one * _LEFT_OUT[kv] for one in batch.kv_pool.scales(layer.layer_id))
        return cls(as_bytes(keys), as_bytes(values), table, (*_factors(layer, k_scale), v_scale), kv)


def _factors(layer: LayerSpec, k_scale: float) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, see `kernel_parts.scores`."""
    scale = layer.scale * k_scale
    if layer.logit_cap is None:
        return scale * LOG2E, 0.0
    return 2.0 * LOG2E * scale / layer.logit_cap, LOG2E * layer.logit_cap
