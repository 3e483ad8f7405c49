"""Memory of this machine for large buffers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_LARGE_PAGE = 2**21


def large_buffer(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of its own mapping, beginning at a large page of the system, in such pages where there are any.

    With small ones a step that reads keys and values all over spends a good part of its time on finding out where
    they are. Nothing is taken from the system before it is written to; what was not written is zero.
    """
    mapping = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not every kernel has large pages; the buffer is as good, only slower.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _LARGE_PAGE
    # The tensor keeps the mapping.
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=begin)
