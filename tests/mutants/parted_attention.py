"""Attention in parts that are put together, as on GPUs, but in plain torch: an original for mutants."""

from __future__ import annotations

import torch

from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.toolkit.model.eight_bit import as_bytes

Tensor = torch.Tensor
Part = tuple[Tensor, Tensor]
"""A part's result [tokens, heads, v dim], and the base-2 log-sum-exp of its scores [tokens, heads]."""

PARTS = 4


class PartedAttention(FixedAttention):
    """Cuts what each request sees into PARTS by its own length. What decode batches share is a part of its own, whose
    keys are read in the first request's row.
    """

    PROVIDES = FixedAttention.PROVIDES | {"shared_prefix"}

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group = batch.kv_groups[layer.kv_group]
        if k is not None and v is not None:
            batch.kv_pool.write(layer.layer_id, group.out_cache_loc, k, v)
        rows, seen = batch.attn_metadata
        slots = group.row_table.index_select(0, rows).long()
        places = torch.arange(slots.shape[1], device=q.device)
        visible = places < seen[:, None]
        if layer.window is not None:
            visible = visible & (places >= seen[:, None] - self.width(layer.window))
        common = self.common(batch)
        parts = [self.part(q, slots[:1].expand_as(slots), visible & (places < common), layer, batch)] if common else []
        own = places - self.start(common)
        sizes = self.sizes(seen - common, batch)
        for at in range(PARTS):
            inside = (own >= 0) & (own // sizes[:, None] == at)
            parts.append(self.part(q, slots, visible & inside, layer, batch))
        return self.together(parts, sinks).to(q.dtype)

    def width(self, window: int) -> int:
        return window

    def common(self, batch: ForwardBatch) -> int:
        return 0 if batch.fixed else batch.common_prefix

    def start(self, common: int) -> int:
        """Return where a request's own part begins."""
        return common

    def sizes(self, seen: Tensor, batch: ForwardBatch) -> Tensor:
        """Return how many keys the parts of each request have."""
        return (seen + PARTS - 1) // PARTS

    def part(self, q: Tensor, slots: Tensor, mask: Tensor, layer: LayerSpec, batch: ForwardBatch) -> Part:
        """Attend to the keys of a mask [tokens, places]."""
        pool, repeats = batch.kv_pool, layer.num_heads // layer.num_kv_heads
        keys, values = (
            x.masked_fill(~mask[:, :, None, None], 0.0).repeat_interleave(repeats, 2)
            for x in self.read(pool, layer, slots)
        )
        scores = torch.einsum("thd,tkhd->thk", q.float(), keys) * layer.scale
        if layer.logit_cap is not None:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        tops = torch.logsumexp(scores, 2)
        weights = (scores - torch.where(tops == -torch.inf, 0.0, tops)[..., None]).exp()
        return torch.einsum("thk,tkhd->thd", weights, values), tops / torch.log(torch.full_like(tops, 2.0))

    def read(self, pool: KVPool, layer: LayerSpec, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 K and V [tokens, places, kv heads, dim]."""
        buffers = pool.keys(layer.layer_id), pool.values(layer.layer_id)
        k, v = (
            as_bytes(buffer)[slots].view(buffer.dtype).float() * scale
            for buffer, scale in zip(buffers, self.scales(pool, layer), strict=True)
        )
        return k, v

    def scales(self, pool: KVPool, layer: LayerSpec) -> tuple[float, float]:
        return pool.scales(layer.layer_id)

    def together(self, parts: list[Part], sinks: Tensor | None) -> Tensor:
        tops = torch.stack([top for _, top in parts])
        if sinks is not None:
            in_base_two = sinks.float() / torch.log(torch.full_like(sinks, 2.0, dtype=torch.float32))
            tops = torch.cat([tops, in_base_two.expand_as(tops[:1])])
        weights = self.weights(tops)[: len(parts)]
        return sum(out * weight[..., None] for (out, _), weight in zip(parts, weights, strict=True))

    def weights(self, tops: Tensor) -> Tensor:
        """Return the share of each part, by its base-2 log-sum-exp."""
        scaled = torch.exp2(tops - tops.amax(0))
        return scaled / scaled.sum(0)
