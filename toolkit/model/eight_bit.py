"""Keys and values in 8 bits: the types, and the conversion to them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pegboard.core.interfaces.layers import LayerSpec

EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of KV that a pool scales and clamps."""


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Return whether KV of this type is scaled and clamped."""
    return dtype in EIGHT_BIT


def latents_in_eight_bits(layers: Iterable[LayerSpec], dtype: torch.dtype) -> str | None:
    """Return why an attention backend that reads no latents of 8 bits cannot have these layers; None if it can."""
    if not is_eight_bit(dtype) or not any(layer.latent for layer in layers):
        return None
    return "it reads no latents (MLA) in 8 bits; set memory.kv_dtype to auto"


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` divided by `scale` in float32 and clamped to what the 8-bit `dtype` holds, in that type, rounded to
    the nearest, ties to even. NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    if scale != 1.0:
        x = x.float() / scale
    return x.clamp(-most, most).to(dtype)


def check_scale(scale: float) -> float:
    """Return a scale of keys or values. Raises ValueError for one that is not positive and finite."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale of keys or values has to be positive and finite, not {scale}")
    return float(scale)


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer [slots, heads, dim] that can be indexed and copied: torch has no such kernels for 8-bit floats,
    so these are seen as bytes. Not a copy.
    """
    return buffer.view(torch.uint8) if is_eight_bit(buffer.dtype) else buffer
