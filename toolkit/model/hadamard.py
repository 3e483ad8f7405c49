"""More accurate keys in 8 bits: multiplies each head of keys, and queries, by a Hadamard matrix.

A number in float8 e4m3 is off by up to a sixteenth, whatever its size. In a score, the products of a query's and a
key's channels, the errors of a few large channels stand out, since both are large there. The orthonormal Hadamard
matrix H spreads them over all channels: (H q) · (H k) = q · k, and the errors average out. That keys can be kept this
way is from QuaRot (Ashkboos et al. 2024).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pegboard.toolkit.model.eight_bit import is_eight_bit

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec

LEAST = 16
"""Channels that are transformed together, at least: fewer do not spread much."""


def block_of(dim: int) -> int:
    """Return how many channels of a head are transformed together: the largest power of two that divides its size; 0
    where that is below LEAST, and nothing is transformed.
    """
    block = dim & -dim
    return block if block >= LEAST else 0


def transforms(pool: KVPool, layer_id: int) -> bool:
    """Return whether a pool keeps the transformed keys of a layer: in 8 bits, and without a scale, for those of a
    checkpoint are made for its keys as they are.
    """
    keys = pool.keys(layer_id)
    return is_eight_bit(keys.dtype) and pool.scales(layer_id)[0] == 1.0 and block_of(keys.shape[-1]) > 0


def transformed(q: torch.Tensor, k: torch.Tensor, layer: LayerSpec, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [tokens, heads, dim] and k [tokens, kv heads, dim] as the pool keeps keys of this layer: as they are, or
    by the matrix, computed in float32 and rounded to their type.

    Networks call it behind rotation and before attention. One that does not is right as well: what it stores and what
    it asks for fit together.
    """
    if not transforms(pool, layer.layer_id):
        return q, k
    return _by_matrix(q), _by_matrix(k)


def _by_matrix(heads: torch.Tensor) -> torch.Tensor:
    found = matrix(block_of(heads.shape[-1]), heads.device)
    wide = heads.float().reshape(-1, found.shape[0])
    return torch.matmul(wide, found).view(heads.shape).to(heads.dtype)


@functools.cache
def matrix(size: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix float32 [size, size], of a power of two, in Sylvester's order.

    It is made on the device, so that no step waits for a copy.
    """
    with torch.inference_mode(False):
        found = torch.full((1, 1), size**-0.5, device=device)
        while found.shape[0] < size:
            found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
        return found
