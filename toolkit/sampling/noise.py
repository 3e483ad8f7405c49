"""For samplers: noise from a seed, a step and optionally a token id, the same in any batch and on any device.

`gumbel(bits(keys(seeds, steps), ids))` is noise for each token: the token drawn is the one with the
largest ``logit / temperature + noise``, which follows the softmax exactly (Gumbel, "Statistical theory of extreme
values", 1954). Since each token has noise of its own, a logit that rounding moves a little changes the draw only where
two tokens are about equally far ahead.
"""

from __future__ import annotations

import torch

_GAMMA = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
_SPREAD = -0x61C88647
_WORD_1 = 0x7FEB352D
_WORD_2 = -0x7B935975


def keys(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """int64 [n], a function of seed and step (int64 [n]) alone, with 64 bits that look random.

    A counter-based generator: the seed and then the step go through splitmix64's finaliser (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014), in int64, which wraps.
    """
    return _mix(_mix(seeds + _GAMMA) + (steps + 1) * _GAMMA)


def uniforms(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """float64 [n] inside (0, 1), one per row, from seed and step (int64 [n]) alone.

    For decisions of a whole row (a coin). To draw tokens by looking such a number up in cumulated probabilities is
    correct, but rounding then changes many a draw (see `Sampler`).
    """
    return _unit(keys(seeds, steps))


def bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int32 [n, m]: 32 bits that look random, for each row's key int64 [n] and token ids int64 [m] or [n, m].

    Two rounds of multiplying and shifting (the constants are those of Wellons' lowbias32), with half of the key in
    front of each. For one key no two ids have the same bits. All is int32, which wraps, so that native code does the
    same in vectors.
    """
    low, high = ((keys << 32) >> 32).to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    z = ids.to(torch.int32) * _SPREAD + low
    z ^= (z >> 16) & 0xFFFF
    z *= _WORD_1
    z ^= ((z >> 15) & 0x1FFFF) ^ high
    z *= _WORD_2
    z ^= (z >> 16) & 0xFFFF
    return z


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float64, from -3.1 to 22.9: -log(-log(u)) of u in the middle of the 2^32 parts of the unit interval."""
    return bits.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def _unit(keys: torch.Tensor) -> torch.Tensor:
    """float64, the middle of one of the 2^52 parts of the unit interval: with one bit more, the last one would be 1."""
    return _shift(keys, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)
