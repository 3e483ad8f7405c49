"""Requests with KV in pages, for one layer: what kernels of attention are checked and timed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench
from pegboard.conformance.attention.batches import make_layer
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.toolkit.model.eight_bit import as_bytes

CHECKED = 4
"""New tokens of a request that are compared, its last ones."""


class Paged:
    """Requests of `lens` tokens, the last `new` of them new, over one layer of Llama 3 8B's heads. Keys and values are
    random, and pages lie in random order, as after hours of serving.
    """

    def __init__(
        self,
        bench: Bench,
        lens: Sequence[int],
        new: int = 1,
        page_size: int = 1,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.bench, self.new = bench, new
        self.layer = make_layer(*bench.either((32, 8, 128), (4, 2, 16)))
        self.dtype = torch.float16 if bench.dry else bench.dtype
        self.lens, count, width = np.array(lens, np.int64), len(lens), -(-max(lens) // page_size) * page_size
        pages = [-(-length // page_size) for length in lens]
        device = bench.device
        kept = self.dtype if kv_dtype is None else kv_dtype
        self.pool = MHAPool(NoOptions(), KVPoolContext(sum(pages), page_size, (self.layer,), kept, device))
        for buffer in (self.pool.keys(0), self.pool.values(0)):
            for part in torch.split(buffer, 2**16):  # 8-bit types have no `normal_`
                part.copy_(torch.randn(part.shape, device=device))
        order = torch.randperm(sum(pages), device=device) + 1
        slots = (order[:, None] * page_size + torch.arange(page_size, device=device)).int()
        self.table = torch.zeros((count + 1, width), dtype=torch.int32, device=device)
        for row, taken in enumerate(torch.split(slots, pages), start=1):
            self.table[row, : taken.numel()] = taken.flatten()
        self.q = torch.randn(count * new, self.layer.num_heads, self.layer.qk_head_dim, device=device).to(self.dtype)
        self.ctx = AttentionContext((self.layer,), page_size, self.dtype, device, count, width, kv_dtype=kv_dtype)
        self.kv_bytes = sum(lens) * self.layer.num_kv_heads * 2 * self.layer.qk_head_dim * kept.itemsize
        self.flops = float(
            4 * self.layer.num_heads * self.layer.qk_head_dim * sum(n * new - new * new / 2 for n in lens)
        )

    def batch(self, backend: AttentionBackend[Any]) -> ForwardBatch:
        """Return the batch of all new tokens."""
        count, lens = len(self.lens), self.lens
        tokens = self._there(np.zeros(count * self.new))
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if self.new == 1 else ForwardMode.EXTEND,
            batch_size=count,
            input_ids=tokens,
            positions=tokens,
            req_pool_indices=self._there(np.arange(1, count + 1)),
            seq_lens=self._there(lens),
            seq_lens_cpu=lens,
            kv_groups=(KVGroupView(self.table, tokens),),
            kv_pool=self.pool,
            attn_backend=backend,
        )
        if self.new > 1:
            new = np.full(count, self.new, np.int64)
            batch.extend_lens, batch.extend_lens_cpu = self._there(new), new
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = self._there(lens - new), lens - new
            batch.extend_start_loc = self._there(np.cumsum(new) - new)
        return batch

    def _there(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.tensor(values.astype(np.int64), device=self.bench.device)

    def call(self, backend: AttentionBackend[Any]) -> Callable[[], torch.Tensor]:
        """Return a layer's call of a backend. KV is there already, so nothing is written."""
        batch = self.batch(backend)
        backend.prepare(batch)
        return lambda: backend.forward(self.q, None, None, self.layer, batch)

    def _kept(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a request, [kv heads, tokens, dim]."""
        slots = self.table[request + 1, : int(self.lens[request])].long()
        k, v = (buffer[slots].transpose(0, 1) for buffer in map(as_bytes, (self.pool.keys(0), self.pool.values(0))))
        return k.view(self.pool.keys(0).dtype), v.view(self.pool.keys(0).dtype)

    def error(self, found: torch.Tensor) -> float:
        """Return the largest relative error, ‖found - exact‖ / ‖exact‖, of the first and the last request."""
        worst = 0.0
        for request in {0, len(self.lens) - 1}:
            start, stop = request * self.new, (request + 1) * self.new
            rows = slice(max(start, stop - CHECKED), stop)
            k, v = (part.float()[None] for part in self._kept(request))
            q = self.q[rows].float().transpose(0, 1)[None]
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.layer.scale, enable_gqa=True)
            exact = exact[0].transpose(0, 1)
            worst = max(worst, float((found[rows].float() - exact).norm() / exact.norm()))
        return worst

    def dense(self) -> Callable[[], torch.Tensor]:
        """Return torch's fused attention over keys and values that lie ready and without pages; lengths are alike."""
        kept = [self._kept(request) for request in range(len(self.lens))]
        k, v = (torch.stack(parts).contiguous() for parts in zip(*kept, strict=True))
        q = self.q.view(len(self.lens), self.new, *self.q.shape[1:]).transpose(1, 2)
        causal = self.new > 1
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
