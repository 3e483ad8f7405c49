"""Memory of this machine: how much is free, and large buffers of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap

import psutil
import torch

_LARGE_PAGE = 2**21


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that the system can give on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


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


def give_back(buffer: torch.Tensor) -> int:
    """Give the memory of a `large_buffer`, or of a view of all of it, back to the system. It is zero from then on, at
    the same addresses, and is taken anew as it is written to. Return its bytes. Raises OSError.
    """
    page = mmap.PAGESIZE
    nbytes = -(-buffer.nbytes // page) * page  # the mapping goes on behind it
    if _libc().madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the system does not take memory back")
    return buffer.nbytes


def trim() -> None:
    """Give memory that was freed back to the system, as far as it can be."""
    with contextlib.suppress(AttributeError):  # not every C library has it
        _libc().malloc_trim(0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
