"""Queues between host and device that need no GPU: one for a device whose memory is its own, one that counts on a
device without data, and one for a device that takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pegboard.toolkit.device_queue import Block, BlockQueue, HostQueue, OnHost, Returning, side_by_side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.toolkit.device_queue import Fetched

_POISON = 0x7F


class _Passed:
    """An event that has passed; before that, what comes back is not there."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self._arrive = arrive

    def synchronize(self) -> None:
        self._arrive()


class ApartQueue(BlockQueue):
    """A CPU's, as strict as that of a device with memory of its own: what was put is not there before `send`, what is
    fetched is not there before it was waited for, and the host sees nothing else.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies = 0
        """Blocks that went over."""

    def block(self, nbytes: int) -> Block:
        self.copies += 1
        block = Block(nbytes, self.device, pinned=False)
        block.there.fill_(_POISON)
        return block

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        joined, order = side_by_side(tensors)
        joined, host = joined.clone(), torch.full(joined.shape, _POISON, dtype=torch.uint8)
        return Returning(host, tensors, order, _Passed(lambda: np.copyto(host.numpy(), joined.numpy())))

    def healthy(self) -> bool:
        return True


class RecordingQueue:
    """That of the device `meta`, whose tensors have no data: a look at any raises. It counts copies, and gives back
    `token` wherever a number is fetched.
    """

    looks = False

    def __init__(self, token: int = 0) -> None:
        self.device = torch.device("meta")
        self.token = token
        self.sent: list[int] = []
        """Arrays that each step's copy has had."""
        self.brought = 0
        """Copies that plugins asked for behind it."""
        self.fetched = 0
        self._waiting = 0

    def begin(self, nbytes: int) -> None:
        if self._waiting:
            raise RuntimeError("a step begins before the arrays of the one before are sent")

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        self._waiting += 1
        return self._like(array)

    def send(self) -> None:
        self.sent.append(self._waiting)
        self._waiting = 0

    def bring(self, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
        self.brought += 1
        return tuple(map(self._like, arrays))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        self.fetched += 1
        return OnHost([torch.full(one.shape, self.token, dtype=one.dtype) for one in tensors])

    def healthy(self) -> bool:
        return True

    def _like(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch.from_numpy(array[..., :0]).dtype, device=self.device)


class TimelineQueue(HostQueue):
    """That of a CPU which seems to be a device beside it: each step takes so many seconds there, one after the other,
    from when its results are asked for.
    """

    looks = False

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._free_at = 0.0

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        self._free_at = max(self._free_at, time.perf_counter()) + self.seconds
        return _Later(tensors, self._free_at)


class _Later:
    def __init__(self, tensors: Sequence[torch.Tensor], at: float) -> None:
        self._tensors = tensors
        self._at = at

    def wait(self) -> Sequence[torch.Tensor]:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self._tensors
