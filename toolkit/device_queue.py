"""The seam between host and device: a step's arrays go over in one copy, and its results come back in one.

Nothing else in a step may wait for the device. On a CPU nothing is copied at all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from pegboard.core.interfaces.on_device import HostArray

logger = logging.getLogger(__name__)

ALIGN = 16
"""Bytes: what is put begins at a multiple of them, as loads of whole vectors want it."""
SMALLEST = 2**16
"""Bytes of a block at least."""


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Return them on the host, once they are there."""


class DeviceQueue(Protocol):
    """Brings arrays to the device and tensors back. One thread calls it, but for `Fetched.wait`."""

    device: torch.device
    looks: bool
    """Whether the host may look at the device's numbers at any time for nothing."""

    def begin(self, nbytes: int) -> None:
        """Begin a step whose arrays take about so many bytes."""

    def put(self, array: HostArray) -> torch.Tensor:
        """Return the array as it will be on the device once `send` was called; it may be kept longer than the step."""

    def send(self) -> None:
        """Have all that was put copied, at once."""

    def bring(self, *arrays: HostArray) -> tuple[torch.Tensor, ...]:
        """Return arrays on the device that are known only now, behind `send`: one more copy."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Have tensors copied to the host, at once, as they are when what was launched before has run."""

    def healthy(self) -> bool:
        """Return whether the device still answers."""


class OnHost:
    """Tensors that are on the host already."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[torch.Tensor]:
        return self._tensors


class HostQueue:
    """The queue of a CPU: tensors share the arrays' memory."""

    looks = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def begin(self, nbytes: int) -> None:
        pass

    def put(self, array: HostArray) -> torch.Tensor:
        return torch.from_numpy(array)

    def send(self) -> None:
        pass

    def bring(self, *arrays: HostArray) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.from_numpy, arrays))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return OnHost(tensors)

    def healthy(self) -> bool:
        return True


class Block:
    """Memory on the host, and as much on the device, that arrays are laid into one after the other.

    Both are new for each step. Those of the host are pinned, and torch keeps them until their copy is done, so none is
    filled again too early. Those of the device live as long as a view of them: sampling parameters outlive their step.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used = 0
        self._bytes = self.host.numpy()

    def put(self, array: HostArray) -> torch.Tensor | None:
        """Lay an array behind the others; return its view on the device, None where there is no room."""
        start, kind = self.used, torch.from_numpy(np.empty(0, array.dtype)).dtype
        stop = start + array.nbytes
        if stop > len(self._bytes):
            return None
        self._bytes[start:stop].view(array.dtype).reshape(array.shape)[...] = array
        self.used = min(-(-stop // ALIGN) * ALIGN, len(self._bytes))
        return self.there[start:stop].view(kind).view(array.shape)

    def send(self) -> None:
        self.there[: self.used].copy_(self.host[: self.used], non_blocking=True)


class Returning:
    """Tensors side by side in one block of the host, which is there once its event has passed."""

    def __init__(self, host: torch.Tensor, like: Sequence[torch.Tensor], order: Sequence[int], ready: Event) -> None:
        self._host = host
        self._shapes = [(tuple(one.shape), one.dtype) for one in like]
        self._order = order
        self._ready = ready

    def wait(self) -> Sequence[torch.Tensor]:
        self._ready.synchronize()
        found: list[torch.Tensor] = [self._host] * len(self._shapes)
        start = 0
        for index in self._order:
            shape, dtype = self._shapes[index]
            stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            found[index] = self._host[start:stop].view(dtype).view(shape)
            start = stop
        return found


class Event(Protocol):
    """What tells that the device has come so far."""

    def synchronize(self) -> None: ...


def side_by_side(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return the bytes of all tensors in one, and in which order they stand there: those of the widest type first, so
    that each begins where its type may.
    """
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].dtype.itemsize)
    parts = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in order]
    return parts[0] if len(parts) == 1 else torch.cat(parts), order


class BlockQueue:
    """The queue of a device whose memory is its own. What it needs of CUDA is in three methods of CudaQueue."""

    looks = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Block] = []

    def begin(self, nbytes: int) -> None:
        self._blocks = [self.block(max(nbytes, SMALLEST))]

    def put(self, array: HostArray) -> torch.Tensor:
        found = self._blocks[-1].put(array) if self._blocks else None
        if found is None:
            # Plugins bring more than was expected: one more block, and one more copy.
            block = self.block(max(array.nbytes, SMALLEST))
            self._blocks.append(block)
            found = block.put(array)
            assert found is not None
        return found

    def send(self) -> None:
        for block in self._blocks:
            block.send()
        self._blocks = []

    def bring(self, *arrays: HostArray) -> tuple[torch.Tensor, ...]:
        block = self.block(sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays))
        found = tuple(map(block.put, arrays))
        block.send()
        return tuple(one for one in found if one is not None)

    def block(self, nbytes: int) -> Block:
        """Return a new block of so many bytes."""
        raise NotImplementedError

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        raise NotImplementedError


class CudaQueue(BlockQueue):
    """The queue of a CUDA device."""

    def block(self, nbytes: int) -> Block:
        return Block(nbytes, self.device, pinned=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        joined, order = side_by_side(tensors)
        host = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(joined, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        return Returning(host, tensors, order, ready)

    def healthy(self) -> bool:
        """Return whether the device still answers: a CUDA context is lost with its first fault."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            logger.exception("%s has failed and does not recover", self.device)
            return False
        return True


def queue_of(device: torch.device) -> DeviceQueue:
    """Return the queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
