"""Attention in Triton: extends, draft trees, decodes whole and in parts, and shared prefixes, as models have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.kernels import Case, Target
from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

META = torch.device("meta")
REQUESTS = 64
MOST_NODES = 64
TILES = 16, 64, 1024
"""Rows of a request's new tokens. Tiles of extends are as large, or as large as the table allows."""
FLAGS = {"window": 1024, "logit_cap": 30.0, "sinks": True}


@dataclass(frozen=True)
class Shape:
    """A layer, and the types of q and of the KV pool."""

    layer: LayerSpec
    dtype: torch.dtype = torch.bfloat16
    kept: torch.dtype | None = None

    @property
    def thorough(self) -> bool:
        """Whether small tiles are compiled, too: not for types that are read as others are, by less code, nor for
        groups that fill large tiles.
        """
        few = self.layer.num_heads <= 16 * self.layer.num_kv_heads
        return few and self.dtype == torch.bfloat16 and self.kept != torch.float8_e5m2

    def backend(self, target: Target, parts: int) -> TritonAttention:
        ctx = AttentionContext((self.layer,), 16, self.dtype, META, REQUESTS, 8192, kv_dtype=self.kept)
        return TritonAttention(TritonAttentionOptions(kv_parts=parts), ctx, target.capability)


def _batch(
    target: Target, shape: Shape, backend: TritonAttention, new: int, nodes: int = 0, requests: int = REQUESTS
) -> ForwardBatch:
    """Return requests of `new` tokens each, at the end of 4096; with a tail of `nodes` tokens, if there are any."""
    pool = PlainPool(None, KVPoolContext(4096, 16, (shape.layer,), shape.kept or shape.dtype, META))
    ints = target.empty(requests, dtype=torch.int64)
    tokens = target.empty(requests * new, dtype=torch.int64)
    lens, news = np.full(requests, 4096), np.full(requests, new)
    view = KVGroupView(target.empty(64, 8192, dtype=torch.int32), tokens)
    mode = ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND
    batch = ForwardBatch(mode, requests, tokens, tokens, ints, ints, lens, (view,), pool, backend)
    if new > 1:
        batch.extend_lens = batch.extend_prefix_lens = batch.extend_start_loc = ints
        batch.extend_lens_cpu, batch.extend_prefix_lens_cpu = news, lens - new
    if nodes:
        batch.tail_lens, batch.tail_lens_cpu, batch.tail_bits = ints, np.full(requests, nodes), tokens
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
    group = shape.layer.num_heads // shape.layer.num_kv_heads
    for rows in TILES if shape.thorough else TILES[-1:]:
        new = max(rows // group, 2)
        _run(target, shape, _batch(target, shape, backend, new), backend)
        _run(target, shape, _batch(target, shape, backend, new, min(new, MOST_NODES)), backend)
    if shape.layer.window is None:
        for requests in (4, REQUESTS):
            shared = replace(_batch(target, shape, backend, 1, requests=requests), common_prefix=2048)
            _run(target, shape, shared, backend)


def _shapes() -> Iterator[tuple[str, Shape]]:
    """By size of heads and types, plain and with all that a layer may have; then groups and sizes out of the usual."""
    fp16, fp32 = torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    bf16 = torch.bfloat16
    types = {
        "bf16": (bf16, None),
        "fp16": (fp16, None),
        "bf16 e4m3": (bf16, e4m3),
        "bf16 e5m2": (bf16, e5m2),
        "fp32": (fp32, None),
        "fp32 e4m3": (fp32, e4m3),
        "fp32 e5m2": (fp32, e5m2),
    }
    for dim in (64, 128, 256, 512):
        heads = 16, 1 if dim == 512 else 4, dim
        for name, (dtype, kept) in types.items():
            yield f"{dim} {name}", Shape(make_layer(*heads), dtype, kept)
            if kept != e5m2 and dtype != fp16:
                yield f"{dim} flags {name}", Shape(make_layer(*heads, **FLAGS), dtype, kept)
    for name in ("64 bf16", "128 bf16", "128 bf16 e4m3", "256 bf16", "256 fp32"):
        dim, kind = name.split(maxsplit=1)
        yield f"{name}, 64 heads to one", Shape(make_layer(64, 1, int(dim)), *types[kind])
    yield "128 fp16 e4m3", Shape(make_layer(64, 8, 128), fp16, e4m3)
    yield "64 bf16, 3 heads to one", Shape(make_layer(9, 3, 64))
    yield "96 bf16, 1 head to one", Shape(make_layer(32, 32, 96))
    yield "192 and 128 bf16, 1 head to one", Shape(make_layer(16, 16, 192, 128))
    for name, dtype in (("bf16", bf16), ("fp16", fp16), ("fp32", fp32)):
        yield f"latents of 512 and 64 {name}, 128 heads", Shape(make_layer(128, 1, 576, 512, latent=True), dtype)
    yield "latents of 512 and 64 bf16, 20 heads", Shape(make_layer(20, 1, 576, 512, latent=True))
    yield "latents of 256 and 32 bf16, 40 heads", Shape(make_layer(40, 1, 288, 256, latent=True))


def _cases() -> Iterator[Case]:
    for name, shape in _shapes():
        half = shape.dtype != torch.float32  # which has no tensor cores
        tensor_cores = frozenset({"extend_kernel", "prefix_kernel", "decode_kernel"}) if half else frozenset()
        yield Case(f"attention {name}", lambda target, shape=shape: _all(target, shape), tensor_cores)


CASES = tuple(_cases())
