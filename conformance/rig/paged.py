"""Paged memory and attention as plain as they can be, to run a network in tests without any other plugin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pegboard.conformance.rig.tails import seen_keys
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.toolkit.model.state_slots import AlternatingSlots

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import Network


class PlainPool(KVPool):
    """One K and one V tensor per layer, NaN wherever nothing was written. `written` holds the slots of every write."""

    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self.written: list[tuple[int, list[int]]] = []
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in ctx.layers:
            dims = (layer.qk_head_dim, layer.v_head_dim)
            shapes = [(self.num_slots, layer.num_kv_heads, dim) for dim in dims]
            k, v = (torch.full(shape, math.nan, dtype=ctx.dtype, device=ctx.device) for shape in shapes)
            self._buffers[layer.layer_id] = k, k[..., : layer.v_head_dim] if layer.latent else v

    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(sum(layer.kept) for layer in layers)

    def keys(self, layer_id: int) -> torch.Tensor:
        return self._buffers[layer_id][0]

    def values(self, layer_id: int) -> torch.Tensor:
        return self._buffers[layer_id][1]

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.written.append((layer_id, slots.tolist()))
        self.keys(layer_id)[slots] = k
        if layer_id not in self._latent:
            self.values(layer_id)[slots] = v

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer_id in self.layer_ids for buffer in self.buffers(layer_id))


class PlainAttention(AttentionBackend):
    """Softmax written out in float64, one request after the other: slow, and easy to see to be right.

    `called` lists the layer ids of all calls.
    """

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        self.called: list[int] = []

    def prepare(self, batch: ForwardBatch) -> None:
        lens = batch.extend_lens_cpu if batch.forward_mode.is_extend else np.ones(batch.batch_size, dtype=np.int64)
        assert lens is not None
        stops = np.cumsum(lens)
        batch.attn_metadata = list(zip((stops - lens).tolist(), stops.tolist(), strict=True))

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
        tokens = batch.num_tokens
        _check_shape("q", q, (tokens, layer.num_heads, layer.qk_head_dim))
        group = batch.kv_groups[layer.kv_group]
        if k is not None and v is not None:
            _check_shape("k", k, (tokens, layer.num_kv_heads, layer.qk_head_dim))
            _check_shape("v", v, (tokens, layer.num_kv_heads, layer.v_head_dim))
            batch.kv_pool.write(layer.layer_id, group.out_cache_loc, k, v)
        self.called.append(layer.layer_id)
        out = q.new_empty((tokens, layer.num_heads, layer.v_head_dim))
        for index, (start, stop) in enumerate(batch.attn_metadata):
            length = int(batch.seq_lens[index])
            slots = group.row_table[batch.req_pool_indices[index], :length].long()
            keys, values = batch.kv_pool.keys(layer.layer_id)[slots], batch.kv_pool.values(layer.layer_id)[slots]
            hidden = _hidden(batch, index, start, stop, layer)
            out[start:stop] = _attend(q[start:stop], keys, values, layer, hidden, sinks).to(q.dtype)
        return out


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"attention got {name} {list(tensor.shape)}; the layer's description says {list(shape)}")


def _hidden(batch: ForwardBatch, index: int, start: int, stop: int, layer: LayerSpec) -> torch.Tensor:
    """Return bool [stop - start, keys]: which keys of a request its packed tokens from `start` to `stop` do not see."""
    length, new = int(batch.seq_lens[index]), stop - start
    if batch.tail_lens is not None and batch.tail_bits is not None and batch.tail_lens[index]:
        hidden = torch.ones((new, length), dtype=torch.bool)
        for row, bits in enumerate(batch.tail_bits[start:stop].tolist()):
            hidden[row, seen_keys(length, int(batch.tail_lens[index]), bits, layer.first_seen)] = False
        return hidden
    keys, last = torch.arange(length), torch.arange(length - new, length)
    first = torch.tensor([layer.first_seen(position) for position in last.tolist()], dtype=torch.int64)
    return (keys > last[:, None]) | (keys < first[:, None])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerSpec,
    hidden: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [new, heads, v_dim] float64 of the last `new` tokens of a request over all its keys [length, kv heads,
    dim].
    """
    repeats = layer.num_heads // layer.num_kv_heads
    keys, values = (one.double().repeat_interleave(repeats, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    if layer.logit_cap is not None:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)


class PagedRun:
    """Runs a network step by step over a `PlainPool`, as the pipeline would. Requests are numbered from 0.

    `attention` is a `PlainAttention` unless another is given. Pages are handed out in a shuffled order, another one for
    each KV group. `pool`, `attention`, `slots`, `tables` and `table`, the first one, may be looked at; `tokens` holds
    what each request has computed so far.
    """

    def __init__(
        self,
        network: Network,
        spec: ModelSpec,
        *,
        attention: AttentionBackend | None = None,
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
        requests: int = 4,
        length: int = 128,
    ) -> None:
        self.network = network
        self.spec = spec
        device = torch.device("cpu")
        pages = -(-length // page_size)
        self.pool = PlainPool(None, KVPoolContext(requests * pages, page_size, spec.layers, dtype, device))
        self.attention: AttentionBackend = attention or PlainAttention(
            None, AttentionContext(spec.layers, page_size, dtype, device, requests, spec.max_context_len)
        )
        draw = np.random.default_rng(0)
        self.tables = [np.zeros((requests + 1, pages * page_size), dtype=np.int32) for _ in spec.kv_groups]
        for table in self.tables:
            order = draw.permutation(requests * pages) + 1
            table[1:] = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, -1)
        self.table = self.tables[0]
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.slots = AlternatingSlots(spec.states, requests, device)

    @torch.inference_mode()
    def step(
        self, new: Mapping[int, Sequence[int]], *, decode: bool = False, cuts: Mapping[int, int] = MappingProxyType({})
    ) -> dict[int, torch.Tensor]:
        """Compute `new` tokens of requests, packed in the mapping's order. Returns their logits [new, vocab] by
        request.

        `decode` makes it a decode step, of one token each; else it is an extend, or a mixed batch where some bring
        one token. `cuts` are as in `AlternatingSlots.step`.
        """
        batch = self.batch(new, decode=decode, cuts=cuts)
        self.attention.prepare(batch)
        hidden = self.network.forward(batch)
        logits = self.network.logits(hidden)
        parts = torch.split(logits, [len(tokens) for tokens in new.values()])
        return dict(zip(new, parts, strict=True))

    def batch(
        self, new: Mapping[int, Sequence[int]], *, decode: bool = False, cuts: Mapping[int, int] = MappingProxyType({})
    ) -> ForwardBatch:
        """Return the ForwardBatch of a step; the requests count its tokens as computed from now on."""
        starts = np.array([len(self.tokens[request]) for request in new], dtype=np.int64)
        lens = np.array([len(tokens) for tokens in new.values()], dtype=np.int64)
        stops = starts + lens
        spans = list(zip(new, starts, stops, strict=True))
        for request, tokens in new.items():
            self.tokens[request] += tokens
        groups = []
        for table in self.tables:
            loc = np.concatenate([table[request + 1, start:stop] for request, start, stop in spans]).astype(np.int64)
            groups.append(KVGroupView(torch.from_numpy(table), torch.from_numpy(loc)))
        mixed = bool((lens == 1).any() and (starts > 0).any())
        mode = ForwardMode.DECODE if decode else ForwardMode.MIXED if mixed else ForwardMode.EXTEND
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(spans),
            input_ids=torch.tensor([token for tokens in new.values() for token in tokens], dtype=torch.int64),
            positions=torch.from_numpy(np.concatenate([np.arange(start, stop) for _, start, stop in spans])),
            req_pool_indices=torch.tensor([request + 1 for request in new], dtype=torch.int64),
            seq_lens=torch.from_numpy(stops),
            seq_lens_cpu=stops,
            kv_groups=tuple(groups),
            kv_pool=self.pool,
            attn_backend=self.attention,
        )
        if self.spec.states:
            batch.states = self.slots.step(np.fromiter(new, dtype=np.int64), starts, stops, cuts)
        if not decode:
            batch.extend_lens, batch.extend_lens_cpu = torch.from_numpy(lens), lens
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.from_numpy(starts), starts
            batch.extend_start_loc = torch.from_numpy(np.cumsum(lens) - lens)
        return batch
