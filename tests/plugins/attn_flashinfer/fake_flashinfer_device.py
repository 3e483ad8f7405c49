"""The device of the imitation of FlashInfer: what is on the host, and when pinned memory is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class HostTensor(torch.Tensor):
    """On the host, while all other tensors count as the device's: on a CPU nothing else tells them apart."""


def on_host(tensor: torch.Tensor, name: str, length: int | None = None) -> torch.Tensor:
    """Return a plain view of an int32 array of the host. Raises ValueError for anything else."""
    if not isinstance(tensor, HostTensor):
        raise ValueError(f"{name} is on the device: to bring it to the host, plan would wait for the device")
    if tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError(f"{name} has to be int32 of one dimension, not {tensor.dtype} of {tensor.dim()}")
    if length is not None and len(tensor) != length:
        raise ValueError(f"{name} has {len(tensor)} numbers, and not {length}")
    return tensor.as_subclass(torch.Tensor)


def on_device(tensor: torch.Tensor, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of the device. Raises ValueError for anything else."""
    if isinstance(tensor, HostTensor) or tensor.device != device:
        raise ValueError(f"{name} has to be on the device")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has to be {dtype}, not {tensor.dtype}")
    return tensor


def check_aligned(buffer: torch.Tensor, name: str) -> None:
    if buffer.data_ptr() % 16:
        raise ValueError(f"{name} has to be 16-byte aligned")


@dataclass(slots=True)
class Schedule:
    """What a plan writes: queries and keys of each request, on the host until it is copied."""

    qo_indptr: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    kv_lens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


class Pinned:
    """The pinned memory of a wrapper, with what the device may still have to do with what stands in it.

    A copy from it is read when a fence behind it has been waited for, and not before. Whatever ran by that copy until
    then is computed again where the memory is written to too early: by the later schedule, as on a device that lags.
    """

    def __init__(self) -> None:
        self.schedule = Schedule()
        self._ran: list[Callable[[Schedule], None]] = []
        self.copying = False

    def write(self, schedule: Schedule) -> None:
        self.schedule = schedule
        if self.copying:
            for again in self._ran:
                again(schedule)
        self._ran.clear()
        self.copying = True

    def run(self, compute: Callable[[Schedule], None], schedule: Schedule) -> None:
        """Compute by a schedule, and remember how while its copy may not have been read."""
        compute(schedule)
        if self.copying:
            self._ran.append(compute)

    def settle(self) -> None:
        """Note that the copy has been read."""
        self.copying = False
        self._ran.clear()


class Device:
    """Knows the schedules in the device's memory, by their address, and the copies that it may not have read yet."""

    def __init__(self) -> None:
        self.schedules: dict[int, Schedule] = {}
        self._pinned: weakref.WeakSet[Pinned] = weakref.WeakSet()

    def copy(self, pinned: Pinned, workspace: torch.Tensor) -> None:
        self._pinned.add(pinned)
        self.schedules[workspace.data_ptr()] = pinned.schedule

    def fence(self) -> DeviceFence:
        return DeviceFence(tuple((one, one.schedule) for one in self._pinned if one.copying))


@dataclass(frozen=True, slots=True)
class DeviceFence:
    """A point behind some copies."""

    copies: tuple[tuple[Pinned, Schedule], ...]

    def wait(self) -> None:
        for pinned, schedule in self.copies:
            if pinned.schedule is schedule:
                pinned.settle()
