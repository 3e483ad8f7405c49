"""Tensors that lie as far apart as those of a pool of 80 GB, in memory of which only what is touched is real."""

from __future__ import annotations

import mmap

import torch

OUTGROWN = 2**31
"""Elements, from where on int32 does not count."""

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's `mmap` has from 3.13 on."""


def far(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor like x with strides of its own, whose offsets may be up to 3 * 2**31 elements.

    What an offset that is computed in int32 reaches instead is memory, too: zeros.
    """
    size = 4 * OUTGROWN * x.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=x.dtype)
    last = sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
    assert OUTGROWN < last < 3 * OUTGROWN, f"the last element is at {last}"
    view = memory.as_strided(x.shape, strides, OUTGROWN)
    view.copy_(x)
    return view
