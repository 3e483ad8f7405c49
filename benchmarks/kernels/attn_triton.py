"""Attention in Triton: extends, draft trees, decodes whole and in parts, and shared prefixes, as models have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.kernels import Case, Target
from pegboard.conformance.attention_fakes import make_layer
from pegboard.conformance.paged import PlainPool
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

META = torch.device("meta")
REQUESTS = 16
FLAGS = {"window": 1024, "logit_cap": 30.0, "sinks": True}


@dataclass(frozen=True)
class Shape:
    """A layer, and the types of q and of the KV pool."""

    layer: LayerSpec
    dtype: torch.dtype = torch.bfloat16
    kept: torch.dtype | None = None

    def backend(self, target: Target, parts: int) -> TritonAttention:
        ctx = AttentionContext((self.layer,), 16, self.dtype, META, REQUESTS, 8192, kv_dtype=self.kept)
        return TritonAttention(TritonAttentionOptions(kv_parts=parts), ctx, target.capability)


def _batch(target: Target, shape: Shape, backend: TritonAttention, new: int, nodes: int = 0) -> ForwardBatch:
    """Return requests of `new` tokens each, at the end of 4096; with a tail of `nodes` tokens, if there are any."""
    pool = PlainPool(None, KVPoolContext(4096, 16, (shape.layer,), shape.kept or shape.dtype, META))
    ints = target.empty(REQUESTS, dtype=torch.int64)
    tokens = target.empty(REQUESTS * new, dtype=torch.int64)
    lens, news = np.full(REQUESTS, 4096), np.full(REQUESTS, new)
    view = KVGroupView(target.empty(64, 8192, dtype=torch.int32), tokens)
    mode = ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND
    batch = ForwardBatch(mode, REQUESTS, tokens, tokens, ints, ints, lens, (view,), pool, backend)
    if new > 1:
        batch.extend_lens = batch.extend_prefix_lens = batch.extend_start_loc = ints
        batch.extend_lens_cpu, batch.extend_prefix_lens_cpu = news, lens - new
    if nodes:
        batch.tail_lens, batch.tail_lens_cpu, batch.tail_bits = ints, np.full(REQUESTS, nodes), tokens
    return batch


def _run(target: Target, shape: Shape, batch: ForwardBatch, backend: TritonAttention) -> None:
    layer = shape.layer
    q = target.empty(batch.num_tokens, layer.num_heads, layer.qk_head_dim, dtype=shape.dtype)
    sinks = target.empty(layer.num_heads, dtype=torch.float32) if layer.num_sinks else None
    backend.prepare(batch)
    backend.forward(q, None, None, layer, batch, sinks=sinks)


def _all(target: Target, shape: Shape) -> None:
    for parts in (1, 8):
        backend = shape.backend(target, parts)
        _run(target, shape, _batch(target, shape, backend, 1), backend)
    _run(target, shape, _batch(target, shape, backend, 512), backend)
    _run(target, shape, _batch(target, shape, backend, 32, 32), backend)
    shared = replace(_batch(target, shape, backend, 1), common_prefix=2048)
    if shape.layer.window is None:
        _run(target, shape, shared, backend)


def _cases() -> Iterator[Case]:
    fp16, fp32 = torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    shapes = {
        "llama-8b bf16": Shape(make_layer(32, 8, 128)),
        "llama-8b fp16": Shape(make_layer(32, 8, 128), fp16),
        "llama-8b e4m3": Shape(make_layer(32, 8, 128), kept=e4m3),
        "llama-8b e5m2": Shape(make_layer(32, 8, 128), kept=e5m2),
        "llama-70b fp16 e4m3": Shape(make_layer(64, 8, 128), fp16, e4m3),
        "llama-70b flags bf16": Shape(make_layer(64, 8, 128, **FLAGS)),
        "smollm bf16": Shape(make_layer(9, 3, 64)),
        "gpt-oss flags bf16": Shape(make_layer(64, 8, 64, **FLAGS)),
        "gpt-oss flags e4m3": Shape(make_layer(64, 8, 64, **FLAGS), kept=e4m3),
        "gemma flags bf16": Shape(make_layer(16, 8, 256, **FLAGS)),
        "gemma e4m3": Shape(make_layer(16, 8, 256), kept=e4m3),
        "latent bf16": Shape(make_layer(16, 1, 512)),
        "smollm flags fp32": Shape(make_layer(9, 3, 64, **FLAGS), fp32),
        "llama-8b fp32": Shape(make_layer(32, 8, 128), fp32),
        "smollm flags fp32 e5m2": Shape(make_layer(9, 3, 64, **FLAGS), fp32, e5m2),
    }
    for name, shape in shapes.items():
        # Heads of 512 leave room for 32 rows, and wgmma takes 64.
        fits = shape.dtype != fp32 and shape.layer.qk_head_dim <= 256
        tensor_cores = frozenset({"extend_kernel"}) if fits else frozenset()
        yield Case(f"attention {name}", lambda target, shape=shape: _all(target, shape), tensor_cores)


CASES = tuple(_cases())
