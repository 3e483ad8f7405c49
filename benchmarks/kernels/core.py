"""The kernels of toolkit/kernels, for Llama-8B and Qwen3-8B, their neighbours in size, and 8-bit KV."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels import Case, Target
from pegboard.toolkit.kernels import operations

TOKENS = 64


def _norms(target: Target, dim: int, dtype: torch.dtype) -> None:
    x, weight = target.empty(TOKENS, dim, dtype=dtype), target.empty(dim, dtype=dtype)
    operations.rms_norm(x, weight, 1e-5)
    operations.add_rms_norm(x, x, weight, 1e-5)


def _heads(
    target: Target,
    shape: tuple[int, int, int, int],
    norm: bool,
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    hadamard: bool = False,
) -> None:
    """`shape`: query heads, KV heads, their size, and half of the dimensions that turn."""
    heads, kv_heads, dim, half = shape
    q, k, v = target.empty(TOKENS, heads + 2 * kv_heads, dim, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    cos = target.empty(TOKENS, 1, half, dtype=dtype)
    keys = target.empty(4096, kv_heads, dim, dtype=kept or dtype)
    weight = target.empty(dim, dtype=dtype)
    store = operations.Store(keys, keys, target.empty(TOKENS, dtype=torch.int64), (0.5, 0.5), hadamard)
    operations.qk_norm_rope_store(q, k, v, cos, cos, store, (weight, weight) if norm else None, 1e-5)


def _rotations(target: Target, half: int, axes: bool) -> None:
    positions = target.empty(*((3, TOKENS) if axes else (TOKENS,)), dtype=torch.int64)
    frequencies = target.empty(half, dtype=torch.float32)
    operations.rotations(positions, frequencies, target.empty(half, dtype=torch.int64), 1.0, torch.bfloat16)


def _indices(target: Target, page_size: int, firsts: bool) -> None:
    table, rows = target.empty(257, 8192, dtype=torch.int32), target.empty(TOKENS, dtype=torch.int64)
    indptr, out = target.empty(TOKENS + 1, dtype=torch.int32), target.empty(2**16, dtype=torch.int32)
    begins = target.empty(TOKENS, dtype=torch.int32) if firsts else None
    operations.gather_indices(table, rows, indptr, out, page_size=page_size, longest=1024, firsts=begins)


def _cases() -> Iterator[Case]:
    for dim in (896, 4096, 16384):
        yield Case(f"norms {dim} bf16", lambda target, dim=dim: _norms(target, dim, torch.bfloat16))
    yield Case("norms 4096 fp32", lambda target: _norms(target, 4096, torch.float32))
    yield Case("silu 14336 bf16", lambda target: operations.silu_mul(target.empty(TOKENS, 2 * 14336)))
    gpt_oss = operations.SiluGate(1.702, 7.0, 1.0, interleaved=True)
    yield Case("silu 2880 bf16, gpt-oss", lambda target: operations.gated_silu(target.empty(TOKENS, 5760), gpt_oss))
    llama = 32, 8, 128, 64
    yield Case("heads llama-8b bf16", lambda target: _heads(target, llama, False))
    yield Case("heads qwen3-8b bf16", lambda target: _heads(target, llama, True))
    yield Case("heads qwen3-8b fp16", lambda target: _heads(target, llama, True, torch.float16))
    yield Case("heads qwen3-8b fp32", lambda target: _heads(target, llama, True, torch.float32))
    yield Case("heads qwen3-8b e4m3", lambda target: _heads(target, llama, True, kept=torch.float8_e4m3fn))
    yield Case("heads qwen3-8b e5m2", lambda target: _heads(target, llama, True, kept=torch.float8_e5m2))
    e4m3 = {"kept": torch.float8_e4m3fn, "hadamard": True}
    for name, shape in (("qwen3-8b", llama), ("14/2 x 64", (14, 2, 64, 32)), ("8/1 x 256", (8, 1, 256, 128))):
        yield Case(f"heads {name} e4m3, Hadamard", lambda target, shape=shape: _heads(target, shape, True, **e4m3))
    yield Case("heads 14/2 x 64 bf16", lambda target: _heads(target, (14, 2, 64, 32), False))
    yield Case("heads 8/1 x 256, 64 turn", lambda target: _heads(target, (8, 1, 256, 32), True))
    yield Case("rotations 64", lambda target: _rotations(target, 64, False))
    yield Case("rotations 64, axes", lambda target: _rotations(target, 64, True))
    for page_size in (1, 16):
        yield Case(f"indices, page {page_size}", lambda target, page=page_size: _indices(target, page, False))
    yield Case("indices, page 16, window", lambda target: _indices(target, 16, True))


CASES = tuple(_cases())
