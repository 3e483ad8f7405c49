"""Operations for layers and backends, with one launch each. Call them only if `kernels.usable` is true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.toolkit.kernels import usable, usable_on_cpu
from pegboard.toolkit.kernels.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.toolkit.kernels.launch import Constant

TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What they compute with. All of it is computed in float32, which would be too little for float64."""

FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""What `FORMAT` of the kernels stands for; 0 for types that Triton casts to."""

_COMMON: dict[str, Constant] = {"enable_fp_fusion": True}
"""Multiply-adds may be fused. That is the default up to Triton 3.9, which warns unless one says so."""


def takes(x: Tensor) -> bool:
    """Return whether kernels are to be used for x."""
    if x.is_cpu and not usable_on_cpu():
        return False
    return x.dtype in TYPES and usable(x.device)


def power_of_two(value: int) -> int:
    """Return the next power of two."""
    return 1 << max(value - 1, 0).bit_length()


def _warps(columns: int) -> int:
    return min(max(columns // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Root mean square norm of the last dimension of x, times weight [dim] + offset. A new, contiguous tensor."""
    from pegboard.toolkit.kernels.functions import rms_norm_kernel

    dim, inner = x.shape[-1], x.shape[-2] if x.dim() > 2 else 1
    # Heads of a wider product are read where they are.
    rows = x.reshape(-1, inner, dim)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(dim)
    shape: dict[str, Constant] = {"INNER": inner, "OFFSET": offset, "DIM": dim, "BLOCK": block}
    shape |= {"num_warps": _warps(block), **_COMMON}
    grid = (rows.shape[0] * inner,)
    launch(rms_norm_kernel, grid, rows, weight, out, rows.stride(0), rows.stride(1), dim, eps, **shape)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [rows, dim] to `residual` in place, and return the norm of the sum times weight [dim]: a new tensor."""
    from pegboard.toolkit.kernels.functions import add_rms_norm_kernel

    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(dim)
    shape: dict[str, Constant] = {"DIM": dim, "BLOCK": block, "num_warps": _warps(block), **_COMMON}
    strides = x.stride(0), residual.stride(0), dim
    launch(add_rms_norm_kernel, (x.shape[0],), x, residual, weight, out, *strides, eps, **shape)
    return out


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, of [rows, size] each, or of one tensor [rows, 2 * size] that has them side by side. A new,
    contiguous tensor [rows, size].
    """
    from pegboard.toolkit.kernels.functions import silu_mul_kernel

    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    rows, size = gate.shape
    out = torch.empty((rows, size), dtype=gate.dtype, device=gate.device)
    block = min(power_of_two(size), 1024)
    shape: dict[str, Constant] = {"SIZE": size, "BLOCK": block, "num_warps": 4, **_COMMON}
    grid = rows, -(-size // block)
    launch(silu_mul_kernel, grid, gate, up, out, gate.stride(0), up.stride(0), size, **shape)
    return out


@dataclass(frozen=True, slots=True)
class SiluGate:
    """gate * sigmoid(alpha * gate) * (up + plus), of which gate is at most `limit`, and up between -limit and limit, in
    tensors that have both side by side, or `interleaved`. The limit of gpt-oss is 7, its alpha 1.702 and plus 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    plus: float = 0.0
    interleaved: bool = False

    def __call__(self, both: Tensor) -> Tensor:
        """Return [rows, size] of [rows, 2 * size], in torch."""
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.plus)


def gated_silu(both: Tensor, gate: SiluGate) -> Tensor:
    """Return `gate` of both [rows, 2 * size] in one launch: a new, contiguous tensor [rows, size]."""
    from pegboard.toolkit.kernels.functions import gated_silu_kernel

    if both.stride(-1) != 1:
        both = both.contiguous()
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    block = min(power_of_two(size), 1024)
    shape: dict[str, Constant] = {"SIZE": size, "INTERLEAVED": gate.interleaved, "LIMITED": gate.limit is not None}
    shape |= {"BLOCK": block, "num_warps": 4, **_COMMON}
    numbers = gate.alpha, gate.limit or 0.0, gate.plus
    launch(gated_silu_kernel, (rows, -(-size // block)), both, out, both.stride(0), size, *numbers, **shape)
    return out


def rotations(
    positions: Tensor, frequencies: Tensor, axes: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, half] of positions int64 [tokens], or [axes, tokens], times frequencies float32 [half].

    Of positions with axes, `axes` int64 [half] says which one a frequency turns with. Both are multiplied by `scaling`.
    """
    from pegboard.toolkit.kernels.functions import rotations_kernel

    tokens, half = positions.shape[-1], frequencies.shape[0]
    positions = positions.contiguous()
    cos = torch.empty((tokens, 1, half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    block = power_of_two(half)
    block_t = max(1, 512 // block)
    has_axes = positions.dim() == 2
    shape: dict[str, Constant] = {"HALF": half, "HAS_AXES": has_axes, "BLOCK_T": block_t, "BLOCK": block}
    shape |= {"num_warps": 4, **_COMMON}
    stride = positions.stride(0) if has_axes else 0
    arguments = positions, axes if has_axes else positions, frequencies, cos, sin, stride, tokens, scaling
    launch(rotations_kernel, (-(-tokens // block_t),), *arguments, **shape)
    return cos, sin


@dataclass(frozen=True, slots=True)
class Store:
    """Where k and v go: buffers [slots, kv heads, dim] of a pool, slots int64 [tokens], and what the stored values are
    to be multiplied by when they are read. With `hadamard` heads of queries and keys are transformed, see
    `pegboard.toolkit.model.hadamard`.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: tuple[float, float] = (1.0, 1.0)
    hadamard: bool = False

    def takes(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor) -> bool:
        """Return whether the kernel can store k and v there: the buffers hold heads of their sizes, one element beside
        the other, in a type that it writes. Transformed heads are a power of two wide, and turned as a whole.
        """
        dim = k.shape[-1]
        if self.hadamard and not dim & -dim == dim == 2 * cos.shape[-1]:
            return False
        return (
            self.keys.shape[1:] == k.shape[1:]
            and self.values.shape[1:] == v.shape[1:]
            and self.keys.device == q.device
            and self.keys.stride(-1) == self.values.stride(-1) == 1
            and self.keys.dtype == self.values.dtype
            and (self.keys.dtype in TYPES or self.keys.dtype in FORMATS)
        )


def qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    store: Store,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm the heads of q and k, turn both, transform both if the store says so, and store k and v as `KVPool.write`
    does. Returns q, new and contiguous.

    q [tokens, heads, dim], k [tokens, kv heads, dim] and v [tokens, kv heads, v dim] may be views of one tensor. cos
    and sin [tokens, 1, half] turn the first 2 * half dimensions, the first half of them against the second (as
    `apply_rope` does). `norms` are the weights [dim] of q's and k's norm; None for none.
    """
    from pegboard.toolkit.kernels.functions import qk_norm_rope_store_kernel

    heads, dim = q.shape[1:]
    kv_heads, v_dim = v.shape[1:]
    half = cos.shape[-1]
    keys, values = store.keys, store.values
    form = FORMATS.get(keys.dtype, 0)
    if form:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_h = min(power_of_two(max(heads, kv_heads)), max(1, 1024 // power_of_two(max(dim, v_dim))))
    shape: dict[str, Constant] = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DV": v_dim, "HALF": half}
    shape |= {"BLOCK_H": block_h, "BLOCK_HALF": power_of_two(half), "BLOCK_REST": power_of_two(dim - 2 * half)}
    shape |= {"BLOCK_DV": power_of_two(v_dim), "HAS_NORM": norms is not None, "FORMAT": form, "num_warps": 4}
    shape["ROUNDS"] = half.bit_length() - 1 if store.hadamard else 0
    tensors = q, k, v, out, keys, values, cos, sin, *(norms or (q, k)), store.slots
    strides = (one.stride(at) for one in (q, k, v, keys, values) for at in (0, 1))
    grid = q.shape[0], -(-heads // block_h) - (-kv_heads // block_h)
    launch(qk_norm_rope_store_kernel, grid, *tensors, *strides, *store.scales, eps, **shape, **_COMMON)
    return out


def gather_indices(
    table: Tensor,
    rows: Tensor,
    indptr: Tensor,
    out: Tensor,
    *,
    page_size: int,
    longest: int,
    firsts: Tensor | None = None,
) -> None:
    """Write the pages of requests one after another: out[indptr[r] + j] = table[rows[r], page_size * j] // page_size.

    `table` int32 [rows, positions] maps to slots; `rows` int64 or int32 [n]; `indptr` int32 [n + 1]; `out` int32, which
    nothing is written to from indptr[n] on. A request has at most `longest` pages in it. With `firsts` int32 or int64
    [n], j counts from the page firsts[r] of the request. Where no kernel is to be used, torch computes it.
    """
    if not usable(out.device):
        _gather_in_torch(table, rows, indptr, out, page_size, firsts)
        return
    from pegboard.toolkit.kernels.functions import gather_indices_kernel

    block = min(power_of_two(longest), 1024)
    grid = rows.shape[0], -(-longest // block)
    shape: dict[str, Constant] = {"PAGE": page_size, "HAS_FIRSTS": firsts is not None, "BLOCK": block, "num_warps": 4}
    tensors = table, rows, indptr, indptr if firsts is None else firsts, out
    launch(gather_indices_kernel, grid, *tensors, table.stride(0), **shape, **_COMMON)


def _gather_in_torch(
    table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor, page_size: int, firsts: Tensor | None
) -> None:
    counts = indptr.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(rows), device=out.device), counts)
    pages = torch.arange(len(owner), device=out.device) - indptr[owner]
    if firsts is not None:
        pages += firsts[owner]
    out[: len(owner)] = table[rows[owner].long(), pages * page_size] // page_size
