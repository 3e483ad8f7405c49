"""Between the projections of a decoder layer and its attention: norms of heads, rotation, and where K and V go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.toolkit.kernels import operations
from pegboard.toolkit.model.hadamard import transformed, transforms
from pegboard.toolkit.model.rope import apply_rope

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.toolkit.model.layers import RMSNorm


def attended(
    heads: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotation: tuple[Tensor, Tensor],
    layer: LayerSpec,
    batch: ForwardBatch,
) -> Tensor:
    """Return the attention [tokens, heads, dim] of a layer whose queries, keys and values lie side by side in `heads`
    [tokens, heads + 2 * kv heads, dim], not normed (by `norms` of q's and k's heads, if there are any) and not turned.

    Where kernels are usable, one of them does all of it and stores K and V, too; else the attention backend does.
    """
    turned = layer.num_heads + layer.num_kv_heads
    q, k, v = heads.split_with_sizes((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), 1)
    if operations.takes(heads) and (store := _store(batch, layer)).takes(q, k, v, rotation[0]):
        weights, eps = (None, 0.0) if norms is None else ((norms[0].weight, norms[1].weight), norms[0].eps)
        q = operations.qk_norm_rope_store(q, k, v, *rotation, store, weights, eps)
        return batch.attn_backend.forward(q, None, None, layer, batch)
    if norms is not None:
        q, k = apply_rope(norms[0](q), *rotation), apply_rope(norms[1](k), *rotation)
    else:
        # q and k lie side by side, so one rotation does both.
        both = apply_rope(heads[:, :turned], *rotation)
        q, k = both.split_with_sizes((layer.num_heads, layer.num_kv_heads), 1)
    q, k = transformed(q, k, layer, batch.kv_pool)
    return batch.attn_backend.forward(q, k, v, layer, batch)


def _store(batch: ForwardBatch, layer: LayerSpec) -> operations.Store:
    pool, name, slots = batch.kv_pool, layer.layer_id, batch.kv_groups[layer.kv_group].out_cache_loc
    keys, values, scales = pool.keys(name), pool.values(name), pool.scales(name)
    return operations.Store(keys, values, slots, scales, transforms(pool, name))
