"""The kernels against float64: rounding once, of float32, is all that they may add."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pegboard.toolkit.kernels import operations
from pegboard.toolkit.model.hadamard import matrix

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)

ROUNDING = {torch.float32: 2e-6, torch.float16: 6e-4}
"""Relative: a few units in the last place, of sums of some hundred terms in float32, and one half of float16's."""


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.double().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.double(), sin.double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@TYPES
def test_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    """Of rows that are no power of two wide, and lie apart."""
    rows = torch.randn(6, 2, 100, dtype=dtype, device=device)[:, :, :72]
    weight = torch.randn(72, dtype=dtype, device=device)
    out = operations.rms_norm(rows, weight, 1e-2)
    assert out.is_contiguous()
    close(out, normed(rows, weight, 1e-2), dtype)


@TYPES
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    """The residual is the rounded sum, and what is normed is the residual."""
    x, before = (torch.randn(5, 96, dtype=dtype, device=device) for _ in range(2))
    weight, residual = torch.randn(96, dtype=dtype, device=device), before.clone()
    out = operations.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, x + before)
    close(out, normed(residual, weight, 1e-5), dtype)


@TYPES
@pytest.mark.parametrize("packed", [True, False])
def test_silu_mul(packed: bool, dtype: torch.dtype, device: torch.device) -> None:
    both = torch.randn(3, 2 * 1100, dtype=dtype, device=device) * 4
    both[0, :4] = torch.tensor([0.0, -80.0, 80.0, float("nan")])
    gate, up = both.chunk(2, dim=-1)
    out = operations.silu_mul(both) if packed else operations.silu_mul(gate.contiguous(), up)
    expected = gate.double() * gate.double().sigmoid() * up.double()
    assert bool(out[0, 3].isnan())
    close(out.nan_to_num(), expected.nan_to_num(), dtype)


@TYPES
@pytest.mark.parametrize(
    "gate",
    [operations.SiluGate(), operations.SiluGate(1.702, 7.0, 1.0, interleaved=True), operations.SiluGate(limit=3.0)],
)
def test_gated_silu(gate: operations.SiluGate, dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(3, 2 * 1100 + 8, dtype=dtype, device=device) * 4
    both = wide[:, 8:]
    both[0, :6] = torch.tensor([0.0, -80.0, 80.0, 90.0, float("nan"), 1.0])
    out = operations.gated_silu(both, gate)
    assert out.is_contiguous()
    assert int(out.isnan().sum()) == 1
    close(out.nan_to_num(), gate(both.double()).nan_to_num(), dtype)


@pytest.mark.parametrize("axes", [False, True])
def test_rotations(axes: bool, device: torch.device) -> None:
    """Angles are taken in float32, as torch takes them: far positions differ from exact ones for both alike."""
    frequencies = 1.0 / 10_000 ** (torch.arange(24, device=device).float() / 24)
    which = torch.arange(24, device=device) % 3
    positions = torch.randint(0, 40_000, (3, 70) if axes else (70,), device=device)
    cos, sin = operations.rotations(positions, frequencies, which, 1.5, torch.float32)
    turning = positions.t()[:, which] if axes else positions[:, None]
    angles = (turning.float() * frequencies).double()[:, None]
    torch.testing.assert_close(cos.double(), angles.cos() * 1.5, rtol=0, atol=2e-6)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.5, rtol=0, atol=2e-6)


def heads_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k and v [7, heads, dim] as views of one tensor."""
    together = torch.randn(7, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    return together.split((heads, kv_heads, kv_heads), dim=1)


def store_of(kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, **scales: float) -> operations.Store:
    """Buffers full of 7 and slots out of order."""
    keys, values = (torch.full((40, kv_heads, dim), 7.0, device=device).to(dtype) for _ in range(2))
    slots = torch.tensor([31, 4, 5, 39, 0, 17, 2], device=device)
    return operations.Store(keys, values, slots, (scales.get("k", 1.0), scales.get("v", 1.0)))


@TYPES
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(9, 3, 64, 32), (10, 10, 24, 8), (2, 1, 20, 10)])
def test_qk_norm_rope_store(
    heads: int, kv_heads: int, dim: int, half: int, norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """More heads than a program has, rotations of some dimensions only, and sizes that are no power of two."""
    q, k, v = heads_of(heads, kv_heads, dim, dtype, device)
    cos, sin = (torch.randn(7, 1, half, dtype=dtype, device=device) for _ in range(2))
    weights = torch.randn(2, dim, dtype=dtype, device=device)
    store = store_of(kv_heads, dim, dtype, device)
    assert store.takes(q, k, v, cos)
    out = operations.qk_norm_rope_store(q, k, v, cos, sin, store, (weights[0], weights[1]) if norm else None, 1e-5)
    assert out.is_contiguous()
    q_in, k_in = (normed(x, w, 1e-5) if norm else x for x, w in zip((q, k), weights, strict=True))
    tolerance = {torch.float32: 4e-6, torch.float16: 2e-3}[dtype]  # of a difference of two products of up to 10
    torch.testing.assert_close(out.double(), turned(q_in, cos, sin), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(store.keys[store.slots].double(), turned(k_in, cos, sin), rtol=tolerance, atol=tolerance)
    assert torch.equal(store.values[store.slots], v)
    others = torch.ones(40, dtype=torch.bool, device=device).index_fill_(0, store.slots, False)
    assert bool((store.keys[others] == 7).all() and (store.values[others] == 7).all())


@TYPES
@pytest.mark.parametrize(("heads", "dim"), [(3, 32), (1, 16), (12, 128)])
def test_hadamard(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Queries and keys by the matrix, values as they are; a power of two of channels, all of which are turned."""
    q, k, v = heads_of(heads, heads, dim, dtype, device)
    cos, sin = torch.randn(2, 7, 1, dim // 2, dtype=dtype, device=device)
    store = replace(store_of(heads, dim, dtype, device), hadamard=True)
    assert store.takes(q, k, v, cos)
    assert not store.takes(q, k, v, cos[..., 1:])
    assert not store.takes(q[..., 1:], k[..., 1:], v[..., 1:], cos)
    out = operations.qk_norm_rope_store(q, k, v, cos, sin, store)
    by = matrix(dim, device).double()
    close(out, turned(q, cos, sin) @ by, dtype)
    close(store.keys[store.slots], turned(k, cos, sin) @ by, dtype)
    assert torch.equal(store.values[store.slots], v)


EIGHT_BIT = pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)


@EIGHT_BIT
@pytest.mark.filterwarnings("ignore:.*invalid value")  # signalling NaNs: only the interpreter, which is numpy, says so
def test_bytes_are_torchs(kept: torch.dtype, device: torch.device) -> None:
    """All that float16 can hold, which has every tie and every subnormal of both types: as torch rounds it, and
    clamped. NaN stays NaN.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.float16)
    v = every.view(16, 1, 4096)
    q, cos = torch.zeros(16, 1, 2, dtype=torch.float16, device=device), torch.ones(16, 1, 1, device=device)
    keys, values = (torch.zeros(16, 1, dim, dtype=kept, device=device) for dim in (2, 4096))
    store = operations.Store(keys, values, torch.arange(16, device=device))
    operations.qk_norm_rope_store(q, q, v, cos, cos, store)
    most = torch.finfo(kept).max
    expected = every.float().clamp(-most, most).to(kept)
    assert torch.equal(values.flatten().float().isnan(), every.isnan())
    real = ~every.isnan()
    assert torch.equal(values.flatten().view(torch.uint8)[real], expected.view(torch.uint8)[real])


@EIGHT_BIT
def test_scales(kept: torch.dtype, device: torch.device) -> None:
    """What is stored, times its scale, is what came in, to half a unit of the type's last place."""
    q, k, v = heads_of(4, 2, 32, torch.float32, device)
    cos, sin = torch.ones(7, 1, 16, device=device), torch.zeros(7, 1, 16, device=device)
    store = store_of(2, 32, kept, device, k=0.02, v=300.0)
    operations.qk_norm_rope_store(q, k, v * 1e4, cos, sin, store)
    rounding = torch.finfo(kept).eps / 2
    got_k, got_v = store.keys[store.slots.cpu()].float() * 0.02, store.values[store.slots.cpu()].float() * 300.0
    torch.testing.assert_close(got_k, k, rtol=rounding * 1.01, atol=0.02 * 2**-6)
    torch.testing.assert_close(got_v, v * 1e4, rtol=rounding * 1.01, atol=300.0 * 2**-6)


@pytest.mark.parametrize("skipped", [False, True], ids=["all", "window"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_gather_indices(page_size: int, skipped: bool, device: torch.device) -> None:
    """Ragged requests, an empty one among them. What lies behind the last one is left alone."""
    counts = torch.tensor([3, 0, 1300 // page_size, 1], device=device)
    firsts = torch.tensor([2, 0, 5, 0], device=device) if skipped else None
    table = torch.randint(0, 99, (9, 100), device=device).repeat_interleave(page_size, 1) * page_size
    table = torch.cat((table, table.flip(1)) * 12, 1).to(torch.int32)
    rows = torch.tensor([8, 0, 3, 5], device=device)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    out = torch.full((int(indptr[-1]) + 3,), -1, dtype=torch.int32, device=device)
    longest = int(counts.max())
    operations.gather_indices(table, rows, indptr, out, page_size=page_size, longest=longest, firsts=firsts)
    skip = firsts.tolist() if firsts is not None else [0] * 4
    pages = [
        table[row, ::page_size][first : first + count] // page_size
        for row, first, count in zip(rows.tolist(), skip, counts.tolist(), strict=True)
    ]
    assert out.tolist() == [*torch.cat(pages).tolist(), -1, -1, -1]


def test_nothing_to_do(device: torch.device) -> None:
    """Batches without a token launch nothing."""
    empty = torch.empty(0, 64, device=device)
    assert operations.silu_mul(empty).shape == (0, 32)
    assert operations.gated_silu(empty, operations.SiluGate()).shape == (0, 32)
    assert operations.add_rms_norm(empty, empty.clone(), torch.ones(64, device=device), 1e-5).shape == (0, 64)
