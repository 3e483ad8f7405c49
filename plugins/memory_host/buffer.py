"""Host memory that pages lie in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, SupportsInt

import torch

from pegboard.core.toolkit.system.memory import large_buffer

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
        self._device = device
        self._pinned = device.type == "cuda" and self._pin()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def provide(self, begin: int, stop: int) -> None:
        """Write to these bytes, so that the system provides them; what is pinned is there."""
        if not self._pinned:
            self.data[begin:stop] = 0

    def close(self) -> None:
        """Unpin the memory; the system has it back when nothing refers to it any more."""
        if self._pinned:
            with torch.cuda.device(self._device):
                _runtime().cudaHostUnregister(self.data.data_ptr())
            self._pinned = False

    def _pin(self) -> bool:
        # Not torch's own pinned memory: that takes the next power of two. In one piece, because a copy must not cross
        # from one registered range into another.
        with torch.cuda.device(self._device):
            error = int(_runtime().cudaHostRegister(self.data.data_ptr(), self.nbytes, _PORTABLE))
        if error:
            message = "%.2f GiB of host memory could not be pinned (CUDA error %d): copies are slower"
            logger.warning(message, self.nbytes / 2**30, error)
        return not error


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


def _runtime() -> _Runtime:
    cudart: Callable[[], _Runtime] = torch.cuda.cudart
    return cudart()
