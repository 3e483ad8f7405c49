"""Attention that graphs can have: all that it does has a shape which depends on the batch's size alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.toolkit.model.eight_bit import as_bytes, is_eight_bit

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.options import Options


class FixedAttention(AttentionBackend):
    """Gathers a whole row of the row table for each token, and masks what it does not see: slow, and exact in float32.

    `prepare` writes which row each token has and how many of its keys it sees into buffers, one pair per fixed size;
    `forward` reads nothing else of a batch's lengths. `fixed` counts the fixed batches with requests that were
    prepared, by size, and `extended` those of prefills by their tokens.
    """

    PROVIDES = frozenset({"graph", "kv_fp8", "logit_cap", "sinks", "sliding_window"})

    def __init__(self, options: Options, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        self.fixed: dict[int, int] = {}
        self.extended: dict[int, int] = {}
        self._buffers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        rows, seen = batch.req_pool_indices, batch.seq_lens
        if batch.forward_mode.is_extend:
            lens, before = batch.extend_lens_cpu, batch.extend_prefix_lens_cpu
            assert lens is not None
            assert before is not None
            rows = rows.repeat_interleave(torch.from_numpy(lens))
            places = [np.arange(start, start + count) + 1 for start, count in zip(before, lens, strict=True)]
            seen = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places]))
        if not batch.fixed:
            batch.attn_metadata = rows, seen
            return
        if not torch.equal(batch.seq_lens, torch.from_numpy(batch.seq_lens_cpu)):
            raise AssertionError("a fixed batch has other lengths on the device than on the host")
        tokens, size = batch.num_tokens, batch.batch_size
        if (tokens, size) not in self._buffers:
            self._buffers[tokens, size] = batch.input_ids.new_empty(tokens), batch.input_ids.new_empty(tokens)
        # Padding tokens of prefills see a key of row 0, as padding requests of decodes do.
        for kept, new, padding in zip(self._buffers[tokens, size], (rows, seen), (0, 1), strict=True):
            kept[: len(new)], kept[len(new) :] = new, padding
        counts, key = (self.extended, tokens) if batch.forward_mode.is_extend else (self.fixed, size)
        counts[key] = counts.get(key, 0) + (batch.real_size > 0)
        batch.attn_metadata = self._buffers[tokens, size]

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
        group, pool = batch.kv_groups[layer.kv_group], batch.kv_pool
        if k is not None and v is not None:
            pool.write(layer.layer_id, group.out_cache_loc, k, v)
        rows, seen = batch.attn_metadata
        slots = group.row_table.index_select(0, rows).long()
        places = torch.arange(slots.shape[1], device=q.device)
        mask = places < seen[:, None]
        if layer.window is not None:
            mask = mask & (places >= seen[:, None] - layer.window)
        scales = pool.scales(layer.layer_id)
        keys = _read(pool.keys(layer.layer_id), slots, mask, scales[0])
        values = _read(pool.values(layer.layer_id), slots, mask, scales[1])
        grouped = q.float().view(q.shape[0], layer.num_kv_heads, -1, q.shape[2])
        scores = torch.einsum("tgrd,tkgd->tgrk", grouped, keys) * layer.scale
        if layer.logit_cap is not None:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        if sinks is not None:
            column = sinks.float().view(1, layer.num_kv_heads, -1, 1).expand(q.shape[0], -1, -1, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(dim=-1)[..., : slots.shape[1]]
        return torch.einsum("tgrk,tkgd->tgrd", weights, values).flatten(1, 2).to(q.dtype)


class FixedExtends(FixedAttention):
    """The same for prefills."""

    PROVIDES = FixedAttention.PROVIDES | {"graph_extend"}


def _read(buffer: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return float32 [tokens, places, kv heads, dim] of the slots, zeros where nothing is seen: NaN may be there."""
    if is_eight_bit(buffer.dtype):
        found = as_bytes(buffer)[slots].view(buffer.dtype).float() * scale
    else:
        found = buffer[slots].float()
    return found.masked_fill(~mask[:, :, None, None], 0.0)
