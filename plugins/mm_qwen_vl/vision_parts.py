"""The parts that the towers are put together from: norms, MLPs, attention, mergers. Inference only.

As in the toolkit's layers, weights are allocated uninitialised, and `targets()` says where a checkpoint's tensors go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.model.layers import FusedLinear, Linears, RMSNorm, activation, empty_parameter
from pegboard.toolkit.model.mlp import GatedMLP

if TYPE_CHECKING:
    from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec
    from pegboard.toolkit.model.weights import Target

EPS = 1e-6
"""Of all norms of all towers; no config says it."""

TURNED_AT_ONCE = 2**18
"""Numbers of a block of rows: 1 MiB in float32."""

Segments = Sequence[tuple[int, int]]
"""Who attends to whom among the rows of a piece, in order: (number of windows, rows of each)."""


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with bias, computed in float32 by torch (Ba et al. 2016)."""

    def __init__(self, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(dim, dtype=dtype, device=device)
        self.bias = empty_parameter(dim, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for a norm called `name`."""
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}


def norm_of(spec: VisionSpec, dim: int, *, dtype: torch.dtype, device: torch.device) -> LayerNorm | RMSNorm:
    """Return a norm over `dim` numbers, of the kind that the tower has."""
    if spec.gated:
        return RMSNorm(dim, EPS, dtype=dtype, device=device)
    return LayerNorm(dim, dtype=dtype, device=device)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the approximation of GELU that CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that `hidden_act` names."""
    return quick_gelu if name == "quick_gelu" else activation(name)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [rows, heads, dim] turned by cos and sin, float32 [rows, 1, dim]: x * cos + (x with its halves swapped)
    * sin, where the first half of sin has its sign changed. Computed in float32, rounded to x's dtype once.

    Equals the toolkit's `apply_rope` bit by bit. A CPU takes some rows at a time: large temporary tensors cost more to
    allocate than to compute.
    """
    half, out = x.shape[-1] // 2, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = max(1, TURNED_AT_ONCE // x[0].numel()) if x.device.type == "cpu" else x.shape[0]
    for part, c, s, into in zip(*(torch.split(one, rows) for one in (x, cos, sin, out)), strict=True):
        wide = part.to(torch.float32, copy=True)
        swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1).mul_(s)
        torch.add(wide.mul_(c), swapped, out=into)
    return out


class PlainMLP(nn.Module):
    """second(act(first(x))) with biases, [rows, in_size] -> [rows, out_size]."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        act: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        in_size, between, out_size = sizes
        self.act = act
        self.first = FusedLinear(in_size, (between,), bias=True, dtype=dtype, device=device)
        self.second = FusedLinear(between, (out_size,), bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.act(self.first(x)))
        return out

    def targets(self, first: str, second: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for linear layers of these names."""
        return self.first.targets((first,)) | self.second.targets((second,))


class Attention(nn.Module):
    """Attention of every row to its own window, both ways, with rotary positions. [rows, width] -> [rows, width]."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.head_dim = spec.heads, spec.head_dim
        self.qkv = FusedLinear(spec.width, (3 * spec.width,), bias=True, dtype=dtype, device=device)
        self.proj = FusedLinear(spec.width, (spec.width,), bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], 3 * self.heads, self.head_dim)
        q, k = turned(heads[:, : 2 * self.heads], cos, sin).chunk(2, dim=1)
        v = heads[:, 2 * self.heads :]
        lengths = [count * size for count, size in segments]
        parts = zip(*(one.split_with_sizes(lengths) for one in (q, k, v)), segments, strict=True)
        found = [self._attend(*part) for part in parts]
        out: Tensor = self.proj(found[0] if len(found) == 1 else torch.cat(found))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, int]) -> Tensor:
        """Attend within windows of equal size that follow each other, all at once: [rows, width]."""
        q, k, v = (x.reshape(*windows, self.heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(windows[0] * windows[1], -1)

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for an attention called `name`."""
        return self.qkv.targets((f"{name}.qkv",)) | self.proj.targets((f"{name}.proj",))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width, between = spec.width, spec.intermediate
        self.norm1 = norm_of(spec, width, dtype=dtype, device=device)
        self.norm2 = norm_of(spec, width, dtype=dtype, device=device)
        self.attn = Attention(spec, dtype=dtype, device=device)
        self.mlp = (
            GatedMLP("mlp", width, between, spec.act, Linears(dtype, device), bias=True)
            if spec.gated
            else PlainMLP((width, between, width), activation_of(spec.act), dtype=dtype, device=device)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out

    def targets(self, name: str, mlp: tuple[str, str]) -> dict[str, Target]:
        """Checkpoint name -> buffer, for a block called `name` whose plain MLP has linear layers called `mlp`."""
        first, second = (f"{name}.mlp.{one}" for one in mlp)
        return {
            **self.norm1.targets(f"{name}.norm1"),
            **self.norm2.targets(f"{name}.norm2"),
            **self.attn.targets(f"{name}.attn"),
            **(self.mlp.targets(f"{name}.mlp") if isinstance(self.mlp, GatedMLP) else self.mlp.targets(first, second)),
        }


class Merger(nn.Module):
    """Patches of a block become one token: [tokens * merge * merge, width] -> [tokens, out_size].

    Each patch is normed, or with `whole` the block as one.
    """

    def __init__(self, spec: VisionSpec, *, whole: bool = False, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = spec.merged_width
        self.whole, self.size = whole, size
        self.norm = norm_of(spec, size if whole else spec.width, dtype=dtype, device=device)
        self.mlp = PlainMLP((size, size, spec.out_size), F.gelu, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.size)) if self.whole else self.norm(x).view(-1, self.size)
        out: Tensor = self.mlp(x)
        return out
