"""Host memory that pages lie in."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, SupportsInt

import torch

from pegboard.toolkit.system.memory import large_buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class _Runtime(Protocol):
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SupportsInt: ...  # noqa: N802

    def cudaHostUnregister(self, address: int) -> SupportsInt: ...  # noqa: N802


class HostBuffer:
    """uint8 [nbytes] in large pages of the system. For a CUDA device it is pinned, so that the device can copy to and
    from it by itself.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = large_buffer(nbytes)
        self._unpin = self._pin(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def provide(self, begin: int, stop: int) -> None:
        """Write to these bytes, so that the system provides them; what is pinned is there."""
        if self._unpin is None:
            self.data[begin:stop] = 0

    def close(self) -> None:
        """Unpin the memory; the system has it back when nothing refers to it any more."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def _pin(self, device: torch.device) -> Callable[[], object] | None:
        """Pin the memory and return what unpins it, at the latest when this buffer goes: the system may give the
        addresses to others then, and could not pin them again. Return None where it cannot be pinned.
        """
        # Not torch's own pinned memory: that takes the next power of two. In one piece, because a copy must not cross
        # from one registered range into another.
        address = self.data.data_ptr()
        with torch.cuda.device(device):
            error = int(_runtime().cudaHostRegister(address, self.nbytes, _PORTABLE))
        if not error:
            unpin = weakref.finalize(self, _unpin, address, device)
            unpin.atexit = False  # the process's memory goes as a whole, and CUDA may be gone before
            return unpin
        message = "%.2f GiB of host memory could not be pinned (CUDA error %d): copies are slower"
        logger.warning(message, self.nbytes / 2**30, error)
        _forget_error(device)
        return None


class Part:
    """K or V of one layer in all host pages. `pages` is uint8 [pages, bytes], whose rows need not be neighbours;
    `records` is the same memory with one record per page.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.records = records_of(pages)
        self.page_bytes = pages.shape[1]


def records_of(pages: torch.Tensor) -> NDArray[np.void]:
    """Return uint8 [pages, bytes] as records [pages] of so many bytes, not a copy.

    numpy moves a record with one memcpy, whatever its size and place, and without a team of threads of its own;
    torch's index_copy_ moves it word by word.
    """
    return pages.numpy().view(f"V{pages.shape[1]}")[:, 0]


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Take the error that CUDA keeps for its next caller, who has nothing to do with it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _runtime() -> _Runtime:
    cudart: Callable[[], _Runtime] = torch.cuda.cudart
    return cudart()
