"""Batches for attention backends, over memory in which every slot that must not be read is poisoned, and what is
right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.toolkit.model.eight_bit import as_bytes, is_eight_bit, stored

if TYPE_CHECKING:
    from numpy.typing import NDArray

Lens = Sequence[tuple[int, int]]
"""(tokens of KV before the batch, new tokens) of each request."""

CPU = torch.device("cpu")


def make_layer(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int | None = None,
    *,
    layer_id: int = 0,
    scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: bool = False,
    kv_group: int = 0,
    latent: bool = False,
    chunked: bool = False,
) -> LayerSpec:
    """Return a layer; `v_dim` is `dim` and `scale` 1 / sqrt(dim) unless they are given."""
    return LayerSpec(
        layer_id=layer_id,
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_head_dim=dim,
        v_head_dim=dim if v_dim is None else v_dim,
        scale=dim**-0.5 if scale is None else scale,
        window=window,
        logit_cap=logit_cap,
        num_sinks=heads if sinks else 0,
        kv_group=kv_group,
        latent=latent,
        chunked=chunked,
    )


def make_sinks(layer: LayerSpec, device: torch.device) -> torch.Tensor | None:
    """Sink logits float32 [num_heads], from none to most of the weight; None for a layer without."""
    if not layer.num_sinks:
        return None
    return torch.linspace(-3.0, 5.0, layer.num_heads, device=device)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one request as the textbook has it, in float64, head by head and query by query.

    q [new, heads, qk dim] are its last tokens; k [len, kv heads, qk dim] and v [len, kv heads, v dim] all of its keys
    and values. Returns float64 [new, heads, v dim].
    """
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    for head in range(q.shape[1]):
        kv_head = head * k.shape[1] // q.shape[1]
        for index in range(q.shape[0]):
            position = k.shape[0] - q.shape[0] + index
            first = layer.first_seen(position)
            scores = k[first : position + 1, kv_head] @ q[index, head] * layer.scale
            if layer.logit_cap is not None:
                scores = torch.tanh(scores / layer.logit_cap) * layer.logit_cap
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double().cpu().view(1)))
            weights = scores.softmax(0)[: position + 1 - first]
            out[index, head] = weights @ v[first : position + 1, kv_head]
    return out


def scales_of(layer_id: int) -> tuple[float, float]:
    """Return the scales of K and V in rigs of 8 bits: no two are the same, and none is 1."""
    return 0.013 + 0.004 * layer_id, 0.021 + 0.005 * layer_id


class ScaledPool(PlainPool):
    """A `PlainPool` that may be of an 8-bit type: it stores scaled and clamped then."""

    def __init__(self, options: None, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self._eight_bit = ctx.dtype if is_eight_bit(ctx.dtype) else None
        self._scales: dict[int, tuple[float, float]] = {}

    def scales(self, layer_id: int) -> tuple[float, float]:
        return self._scales.get(layer_id, (1.0, 1.0))

    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        self._scales[layer_id] = k, v

    def fill(self, layer_id: int, value: float) -> None:
        """Put a number into all slots, as it is."""
        for buffer in self.buffers(layer_id):
            as_bytes(buffer).fill_(as_bytes(torch.tensor([value]).to(buffer.dtype)).item())

    def put(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v at `slots`. Unlike `write` this is not noted in `written`."""
        for buffer, x, scale in zip(self.buffers(layer_id), (k, v), self.scales(layer_id), strict=False):
            kept = x if self._eight_bit is None else as_bytes(stored(x, scale, self._eight_bit))
            as_bytes(buffer)[slots] = kept.to(as_bytes(buffer).dtype)

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.written.append((layer_id, slots.tolist()))
        self.put(layer_id, slots, k, v)


class QuietPool(ScaledPool):
    """One that notes no writes: it looks at nothing, and so can be part of a graph."""

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.put(layer_id, slots, k, v)


class AttentionRig:
    """Requests with random q, k and v, paged as the pipeline would, and a batch of their new tokens.

    Pages are handed out in a shuffled order and rows of the row table too. Every slot that no request owns holds
    `poison`: page 0, free pages, and the rest of a request's last page. So do the slots that the new tokens are to be
    written to. What a row says beyond a request's length points at such slots. With several KV groups each has a row
    table of its own over pages of its own. All requests share the first `common` tokens, whole pages.

    The pool is of `kv_dtype`, None for `dtype`. One of 8 bits has scales other than 1, which `scales_of` tells.

    `q[i]`, `k[i]` and `v[i]` belong to layer i of `layers`: packed new queries [tokens, heads, qk dim], and per
    request the keys [len, kv heads, qk dim] and values of all its tokens.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        lens: Lens,
        *,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        seed: int = 0,
        spread: float = 1.0,
        poison: float = math.nan,
        kv_dtype: torch.dtype | None = None,
        common: int = 0,
    ) -> None:
        self.layers = tuple(layers)
        self.prefix = np.array([prefix for prefix, _ in lens], dtype=np.int64)
        self.new = np.array([new for _, new in lens], dtype=np.int64)
        self.lens = self.prefix + self.new
        self.dtype, self.device, self.page_size, self.kv_dtype = dtype, device, page_size, kv_dtype
        self.common = common
        self._random = torch.Generator().manual_seed(seed)
        self.tables, self.slots, num_pages = self._page(np.random.default_rng(seed))
        pool_layers = tuple({layer.layer_id: layer for layer in layers}.values())
        kept = dtype if kv_dtype is None else kv_dtype
        self.pool = ScaledPool(None, KVPoolContext(num_pages, page_size, pool_layers, kept, device))
        for layer in pool_layers:
            self.pool.fill(layer.layer_id, poison)
            if is_eight_bit(kept):
                self.pool.set_scales(layer.layer_id, *scales_of(layer.layer_id))
        self.q, self.k, self.v = [], [], []
        for layer in self.layers:
            self.q.append(self._normal(int(self.new.sum()), layer.num_heads, layer.qk_head_dim) * spread)
            self.k.append([self._keys(layer, length) * spread for length in self.lens])
            self.v.append([self._values(layer, k) for k in self.k[-1]])
            for request, prefix in enumerate(self.prefix):
                self.k[-1][request][:common] = self.k[-1][0][:common]
                self.v[-1][request][:common] = self.v[-1][0][:common]
                slots = self.slots[layer.kv_group][request][:prefix]
                self.pool.put(layer.layer_id, slots, self.k[-1][request][:prefix], self.v[-1][request][:prefix])

    def _page(self, random: np.random.Generator) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], int]:
        """Row tables, slots of each request in each group, and the number of pages."""
        groups = 1 + max(layer.kv_group for layer in self.layers)
        pages = -(-self.lens // self.page_size)
        spare = 2  # free pages, so that there are free slots even where no last page has any
        total = groups * int(pages.sum()) + spare
        order = random.permutation(total) + 1
        free = order[-spare:] * self.page_size
        self.rows = random.permutation(len(self.lens) + 2)[: len(self.lens)]
        self.context = int(self.lens.max(initial=0)) + self.page_size
        tables, owned, at = [], [], 0
        for _ in range(groups):
            table = random.choice(free, size=(len(self.lens) + 2, self.context)).astype(np.int32)
            slots: list[torch.Tensor] = []
            for row, length, count in zip(self.rows, self.lens, pages, strict=True):
                own = (order[at : at + count, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[:length]
                if slots:
                    own[: self.common] = slots[0][: self.common].cpu()
                table[row, :length] = own
                slots.append(torch.from_numpy(own).to(self.device))
                at += count
            tables.append(torch.from_numpy(table).to(self.device))
            owned.append(slots)
        return tables, owned, total

    def _keys(self, layer: LayerSpec, count: int) -> torch.Tensor:
        return self._normal(count, layer.num_kv_heads, layer.qk_head_dim)

    def _values(self, layer: LayerSpec, k: torch.Tensor) -> torch.Tensor:
        """Return values for keys: random ones, or those of latents."""
        if layer.latent:
            return k[..., : layer.v_head_dim]
        return self._normal(len(k), layer.num_kv_heads, layer.v_head_dim)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.dtype).to(self.device)

    def context_for(self, max_batch: int | None = None) -> AttentionContext:
        """Return what to build the backend from."""
        batch = len(self.lens) if max_batch is None else max_batch
        return AttentionContext(
            self.layers, self.page_size, self.dtype, self.device, batch, self.context, kv_dtype=self.kv_dtype
        )

    def batch(self, backend: AttentionBackend, mode: ForwardMode | None = None) -> ForwardBatch:
        """Return the batch of the new tokens: decode where each request brings one, else extend."""
        if mode is None:
            mode = ForwardMode.DECODE if bool((self.new == 1).all()) else ForwardMode.EXTEND
        tokens = int(self.new.sum())
        empty = [np.empty(0, dtype=np.int64)]
        positions = np.concatenate([*map(np.arange, self.prefix, self.lens), *empty])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.lens),
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            positions=self._on_device(positions),
            req_pool_indices=self._on_device(self.rows),
            seq_lens=self._on_device(self.lens),
            seq_lens_cpu=self.lens,
            kv_groups=tuple(KVGroupView(table, self.new_slots(group)) for group, table in enumerate(self.tables)),
            kv_pool=self.pool,
            attn_backend=backend,
            common_prefix=self.common,
        )
        if mode.is_extend:
            batch.extend_lens, batch.extend_lens_cpu = self._on_device(self.new), self.new
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = self._on_device(self.prefix), self.prefix
            batch.extend_start_loc = self._on_device(np.cumsum(self.new) - self.new)
        return batch

    def _on_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def spoil_behind_windows(self, index: int) -> None:
        """Fill the pages with NaN that no new token sees in one of `layers`."""
        layer = self.layers[index]
        for request, prefix in enumerate(self.prefix):
            dead = layer.first_seen(int(prefix)) // self.page_size * self.page_size
            slots = self.slots[layer.kv_group][request][:dead]
            for buffer in self.pool.buffers(layer.layer_id):
                buffer[slots] = math.nan

    def new_slots(self, group: int = 0) -> torch.Tensor:
        """Return where the batch's K and V go, int64 [tokens]."""
        parts = [slots[prefix:] for slots, prefix in zip(self.slots[group], self.prefix, strict=True)]
        return torch.cat([*parts, torch.empty(0, dtype=torch.int64, device=self.device)])

    def new_kv(self, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed k and v of the new tokens, of one of `layers`."""
        k, v = (
            [one[prefix:] for one, prefix in zip(parts[index], self.prefix, strict=True)] for parts in (self.k, self.v)
        )
        if not k:
            layer = self.layers[index]
            k = [self._keys(layer, 0)]
            v = [self._values(layer, k[0])]
        return torch.cat(k), torch.cat(v)

    def expected(self, index: int = 0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return what is right, float64 [tokens, heads, v dim] on the host."""
        stops = np.cumsum(self.new)
        return torch.cat(
            [
                attention_reference(
                    self.q[index][stop - new : stop], *self.read_back(index, k, v), self.layers[index], sinks
                )
                for stop, new, k, v in zip(stops, self.new, self.k[index], self.v[index], strict=True)
            ]
        )

    def read_back(self, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a layer's k and v are once the pool has stored them; float64 where it keeps 8 bits."""
        if self.kv_dtype is None or not is_eight_bit(self.kv_dtype):
            return k, v
        scales = self.pool.scales(self.layers[index].layer_id)
        k, v = (stored(x, scale, self.kv_dtype).double() * scale for x, scale in zip((k, v), scales, strict=True))
        return k, v

    @torch.inference_mode()
    def run(
        self,
        backend: AttentionBackend,
        *,
        mode: ForwardMode | None = None,
        sinks: torch.Tensor | None = None,
        shared: bool = False,
    ) -> torch.Tensor:
        """Return the backend's answer for the first layer. With `shared` the new K and V are there already, and not
        passed.
        """
        batch = self.batch(backend, mode)
        backend.prepare(batch)
        k, v = self.new_kv()
        layer = self.layers[0]
        if shared:
            slots = self.new_slots(layer.kv_group)
            self.pool.put(layer.layer_id, slots, k, v)
            return backend.forward(self.q[0], None, None, layer, batch, sinks=sinks)
        return backend.forward(self.q[0], k, v, layer, batch, sinks=sinks)
