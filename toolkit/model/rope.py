"""Rotary position embeddings (Su et al. 2021), rotate-half layout, equal to transformers' in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pegboard.toolkit.kernels import operations, usable
from pegboard.toolkit.model.rope_spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, seq_len: int | None = None) -> Tensor:
    """Inverse frequencies float32 [dim / 2] of a rope, on the CPU.

    `seq_len` matters to "dynamic" alone (NTK-aware scaling): the length whose frequencies are wanted. Formulas as in
    transformers' modeling_rope_utils: linear scaling (kaiokendev), dynamic NTK (bloc97, emozilla), Llama 3.1's
    wavelength bands, YaRN (Peng et al. 2023).
    """
    base = spec.theta
    if spec.rope_type == "dynamic":
        length = max(seq_len or spec.max_position, spec.max_position)
        stretch = spec.factor * length / spec.max_position - (spec.factor - 1)
        base = base * stretch ** (spec.dim / (spec.dim - 2))
    powers = base ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim)
    plain: Tensor = 1.0 / powers
    if spec.rope_type == "linear":
        return plain / spec.factor
    if spec.rope_type == "llama3":
        return _llama3(spec, plain)
    if spec.rope_type == "yarn":
        return _yarn(spec, powers)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    low, high, original = spec.llama3_low_freq_factor, spec.llama3_high_freq_factor, spec.original_max_position
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / spec.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / spec.factor + smooth * scaled
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(spec: RopeSpec, powers: Tensor) -> Tensor:
    def correction(rotations: float) -> float:
        return (spec.dim * math.log(spec.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(spec.theta)
        )

    low, high = correction(spec.yarn_beta_fast), correction(spec.yarn_beta_slow)
    if spec.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [tokens, heads, dim] by cos, sin [tokens, 1, dim / 2], in x's dtype. Returns a new, contiguous tensor."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryEmbedding(nn.Module):
    """cos and sin of positions, computed once per batch and shared by all layers; no table, so no limit on positions.

    "dynamic" ropes use the frequencies of contexts up to the model's limit (where they equal the unscaled ones): cached
    keys must not depend on how long their request became.
    """

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.spec = spec
        self.inv_freq: Tensor
        self.axes: Tensor
        self.register_buffer("inv_freq", inverse_frequencies(spec).to(device), persistent=False)
        self.register_buffer("axes", torch.tensor(spec.axes, dtype=torch.int64, device=device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, dim / 2] in `dtype`, for positions int64 [tokens], or [3, tokens] (time, height,
        width) where the rope has axes. Angles are taken in float32. A token whose axes are equal has the angles of
        that one position, bit by bit. Raises ValueError for positions of three axes where the rope has none.
        """
        if positions.dim() == 2 and not self.spec.axes:
            raise ValueError(f"positions {list(positions.shape)} have axes, and this model's rope has none")
        scaling = self.spec.attention_scaling
        if dtype in operations.TYPES and usable(positions.device):
            return operations.rotations(positions, self.inv_freq, self.axes, scaling, dtype)
        if positions.dim() == 1:
            angles = positions[:, None].float() * self.inv_freq
        else:
            # The axis that each frequency turns with.
            angles = positions.t().float().index_select(1, self.axes) * self.inv_freq
        return (angles.cos() * scaling).to(dtype)[:, None], (angles.sin() * scaling).to(dtype)[:, None]
