"""Attention in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.attn_torch.gather import Scratch, take
from pegboard.plugins.attn_torch.masks import CausalMasks
from pegboard.plugins.attn_torch.plan import DecodeGroup, ExtendSpan, Plan, Rows, TreeSpan, make_plan
from pegboard.plugins.attn_torch.softmax import attend, fused_fits
from pegboard.toolkit.model.eight_bit import is_eight_bit, latents_in_eight_bits

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

_BLOCK = 256
"""Queries per call where a mask is needed: large enough for the fused kernel, small enough to skip most hidden keys."""
_SCORES = 1 << 22
"""Scores that the written-out softmax keeps at a time (16 MB in float32)."""

_Kind = tuple[int, int | None, bool]
_Plans = dict[_Kind, Plan]


class TorchAttention(AttentionBackend[NoOptions]):
    """The reference for other backends, and the default on a CPU.

    Decoding requests of similar length are gathered, padded and computed in one call; prompts are computed one request
    at a time. K and V are read in place wherever a request's slots follow each other. Query heads that share a KV head
    are laid out as rows or as a broadcast dimension, so K and V are never repeated. What a pool keeps in another type
    is read back from it, new tokens' too, so that what comes out does not depend on how a prompt is cut.
    """

    def __init__(self, options: NoOptions, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        self._masks = CausalMasks(_BLOCK, ctx.max_context_len, ctx.dtype, ctx.device)
        self._gathered = Scratch(ctx.dtype, ctx.device), Scratch(ctx.dtype, ctx.device)
        self._scaled = is_eight_bit(ctx.pool_dtype)
        self._narrowed = ctx.pool_dtype != ctx.dtype
        self._kinds = sorted(set(map(_kind, ctx.layers)), key=str)

    @classmethod
    def supports(cls, options: NoOptions, ctx: AttentionContext) -> str | None:
        return latents_in_eight_bits(ctx.layers, ctx.pool_dtype)

    def prepare(self, batch: ForwardBatch) -> None:
        batch.attn_metadata = plans = {}
        for kind in self._kinds:
            plans[kind] = self._made(batch, kind)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            batch.kv_pool.write(layer.layer_id, batch.kv_groups[layer.kv_group].out_cache_loc, k, v)
        plan = self._plan(layer, batch)
        if sinks is not None:
            sinks = sinks.view(layer.num_kv_heads, -1)
        if plan.calls == 1:  # nothing to put together
            if plan.decodes:
                return self._decode(q, plan.decodes[0], layer, batch, sinks)
            if plan.trees:
                return self._tree(q, plan.trees[0], layer, batch, sinks)
            return self._extend(q, k, v, plan.extends[0], layer, batch, sinks)
        out = q.new_empty((q.shape[0], layer.num_heads, layer.v_head_dim))
        for group in plan.decodes:
            out[group.tokens] = self._decode(q, group, layer, batch, sinks)
        for span in plan.extends:
            out[span.start : span.start + span.new] = self._extend(q, k, v, span, layer, batch, sinks)
        for tree in plan.trees:
            out[tree.start : tree.start + tree.new] = self._tree(q, tree, layer, batch, sinks)
        return out

    def _plan(self, layer: LayerSpec, batch: ForwardBatch) -> Plan:
        plans: _Plans = batch.attn_metadata
        kind = _kind(layer)
        if kind not in plans:  # a layer that the context did not name
            plans[kind] = self._made(batch, kind)
        return plans[kind]

    def _made(self, batch: ForwardBatch, kind: _Kind) -> Plan:
        kv_group, window, chunked = kind
        return make_plan(batch, kv_group, window, self.ctx.dtype, chunked=chunked)

    def _decode(
        self, q: torch.Tensor, group: DecodeGroup, layer: LayerSpec, batch: ForwardBatch, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[size, num_heads, v_dim]. The query heads of one KV head become the rows of one small matrix product."""
        k, v = self._gather(layer, batch, group.slots)
        k = k.view(group.size, group.length, *k.shape[1:]).transpose(1, 2)
        v = v.view(group.size, group.length, *v.shape[1:]).transpose(1, 2)
        rows = take(q, group.tokens).view(group.size, layer.num_kv_heads, -1, layer.qk_head_dim)
        mask = group.mask
        if mask is not None:
            mask = mask.expand(-1, 1, rows.shape[2], -1)
        out = attend(rows, k, v, layer, mask=mask, sinks=None if sinks is None else sinks[..., None])
        return out.reshape(group.size, layer.num_heads, layer.v_head_dim)

    def _gather(self, layer: LayerSpec, batch: ForwardBatch, slots: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `slots` in q's type, valid until the next call."""
        pool, (keys, values), name = batch.kv_pool, self._gathered, layer.layer_id
        k_scale, v_scale = pool.scales(name) if self._scaled else (1.0, 1.0)
        if layer.latent:
            latents = keys.take(pool.keys(name), slots)
            return latents, latents[..., : layer.v_head_dim]
        return keys.take(pool.keys(name), slots, k_scale), values.take(pool.values(name), slots, v_scale)

    def _extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        span: ExtendSpan,
        layer: LayerSpec,
        batch: ForwardBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute [new, num_heads, v_dim] of one request."""
        tokens = slice(span.start, span.start + span.new)
        if span.prefix or k is None or v is None or self._narrowed:
            k, v = self._gather(layer, batch, span.slots)
        else:  # what was just written is all that there is, as it came
            k, v = k[tokens], v[tokens]
        queries, keys, values = _by_kv_heads(q[tokens], k, v)
        if not span.prefix and fused_fits(layer, sinks) and (layer.window is None or layer.window >= span.new):
            out = attend(queries, keys, values, layer, causal=True)
        else:
            out = self._blocks(queries, keys, values, span, layer, sinks)
        return out.permute(2, 0, 1, 3).reshape(span.new, layer.num_heads, layer.v_head_dim)

    def _tree(
        self, q: torch.Tensor, span: TreeSpan, layer: LayerSpec, batch: ForwardBatch, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute [new, num_heads, v_dim] of one request whose tokens see some of the last keys only."""
        tokens = slice(span.start, span.start + span.new)
        queries, keys, values = _by_kv_heads(q[tokens], *self._gather(layer, batch, span.slots))
        sinks = None if sinks is None else sinks[..., None, None]
        out = attend(queries, keys, values, layer, mask=span.mask, sinks=sinks)
        return out.permute(2, 0, 1, 3).reshape(span.new, layer.num_heads, layer.v_head_dim)

    def _blocks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        span: ExtendSpan,
        layer: LayerSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[kv heads, group, new, v_dim], some queries at a time, each over the keys that it can see and no more."""
        out = q.new_empty((*q.shape[:3], layer.v_head_dim))
        if sinks is not None:
            sinks = sinks[..., None, None]
        block = _BLOCK
        if not fused_fits(layer, sinks):
            block = max(1, min(_BLOCK, _SCORES // (layer.num_heads * k.shape[2])))
        for start in range(0, span.new, block):
            stop = min(start + block, span.new)
            first = 0  # in k, whose first row is position span.first
            if layer.window is not None:
                first = max(0, span.prefix + start - layer.window + 1 - span.first)
            last = span.prefix + stop - span.first
            mask = self._masks.get(stop - start, last - first, layer.window)
            out[:, :, start:stop] = attend(
                q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], layer, mask=mask, sinks=sinks
            )
        return out


def _kind(layer: LayerSpec) -> _Kind:
    """Return what the plan of a layer depends on."""
    return layer.kv_group, layer.window, layer.chunked


def _by_kv_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [kv heads, group, tokens, dim] of q [tokens, heads, dim], and of k and v [keys, kv heads, dim], which
    broadcast over the group without a copy.
    """
    queries = q.view(q.shape[0], k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
    keys, values = (one.transpose(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1) for one in (k, v))
    return queries, keys, values
