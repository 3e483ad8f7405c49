"""Pools of more than 2**31 elements: where they lie changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from tests.far import far

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is all real")

CPU = torch.device("cpu")
SLOTS, DIM = 32, 80
LAYER = make_layer(8, 4, DIM)
LENS = np.array([20, 17, 23])
SHARED = 16
APART = (70_000_000, 721_000_000, 1)
"""Strides of keys and values, of which both outgrow int32: a pool may have its heads one after another, too."""


class Pool(PlainPool):
    """With tensors that are given to it."""

    def __init__(self, ctx: KVPoolContext, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(None, ctx)
        self._given = keys, values

    def keys(self, layer_id: int) -> torch.Tensor:
        return self._given[0]

    def values(self, layer_id: int) -> torch.Tensor:
        return self._given[1]


def attended(new: int, tails: int, prefix: int, parts: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what the last `new` tokens of three requests get, which share the KV of `SHARED` tokens."""
    pool = Pool(KVPoolContext(SLOTS, 1, (LAYER,), keys.dtype, CPU), keys, values)
    table = torch.zeros(4, 32, dtype=torch.int32)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0)).int()
    table[:, :SHARED] = slots[:SHARED]
    free = iter(slots[SHARED:].split([int(length) - SHARED for length in LENS] + [4]))
    for row, length in enumerate(LENS):
        table[row + 1, SHARED:length] = next(free)
    if keys.stride(0) > 1000:
        table = far(table, (2**30, 1))
    tokens = torch.zeros(3 * new, dtype=torch.int64)
    ctx = AttentionContext((LAYER,), 1, keys.dtype, CPU, 3, 32)
    backend = TritonAttention(TritonAttentionOptions(kv_parts=parts, kv_split=16, block_keys=16), ctx)
    mode = ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND
    view, lens = KVGroupView(table, tokens), torch.from_numpy(LENS)
    batch = ForwardBatch(mode, 3, tokens, tokens, torch.arange(1, 4), lens, LENS, (view,), pool, backend)
    if new > 1:
        news = np.full(3, new)
        batch.extend_lens, batch.extend_prefix_lens = torch.from_numpy(news), torch.from_numpy(LENS - new)
        batch.extend_start_loc = torch.arange(3) * new
        batch.extend_lens_cpu, batch.extend_prefix_lens_cpu = news, LENS - new
    if tails:
        batch.tail_lens_cpu = np.full(3, tails)
        batch.tail_lens = torch.full((3,), tails)
        batch.tail_bits = torch.tensor([1, 3, 5, 13] * 3)
    batch = replace(batch, common_prefix=prefix)
    q = torch.randn(3 * new, 8, DIM, generator=torch.Generator().manual_seed(1)).to(keys.dtype)
    backend.prepare(batch)
    return backend.forward(q, None, None, LAYER, batch)


CASES = {
    "decode": (1, 0, 0, 1, torch.float16),
    "split": (1, 0, 0, 2, torch.float32),
    "shared": (1, 0, SHARED, 2, torch.float16),
    "extend": (4, 0, 0, 1, torch.float32),
    "tree": (4, 4, 0, 1, torch.float16),
}


@pytest.mark.parametrize(("new", "tails", "prefix", "parts", "dtype"), CASES.values(), ids=CASES)
def test_where_it_lies(new: int, tails: int, prefix: int, parts: int, dtype: torch.dtype) -> None:
    """Each kernel: a product that overflows reads zeros."""
    keys, values = torch.randn(2, SLOTS, 4, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    near = attended(new, tails, prefix, parts, keys, values)
    out = attended(new, tails, prefix, parts, far(keys, APART), far(values, APART))
    assert bool(near.isfinite().all())
    assert torch.equal(out, near)
