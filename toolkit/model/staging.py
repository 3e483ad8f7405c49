"""Copies tensors from files to a GPU: threads read ahead into page-locked memory while the GPU copies."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from pegboard.core.interfaces.errors import ModelError

_READERS = 4
"""One thread copies 1 to 3 GB/s out of the system's cache of files, and a GPU takes 20 and more."""
_BUFFERS = 2 * _READERS
"""As many again as are being read into, which the GPU is copying from."""
_PIECE = 2**24
"""Bytes of a buffer."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where numbers lie: so many bytes of a file from `start` on, in C order, of a dtype and a shape."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(slots=True)
class _Part:
    """Some of the numbers of a tensor and their place, flat; `last` gets the whole tensor once they are there."""

    file: Path
    start: int
    dtype: torch.dtype
    place: torch.Tensor
    last: tuple[torch.Tensor, torch.Tensor] | None = None


class _Buffer:
    """Memory that is read into, and then copied from."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self._copied = torch.Event(device) if cuda else None

    def numbers(self, part: _Part) -> torch.Tensor:
        return self.memory[: part.place.numel() * part.dtype.itemsize].view(part.dtype)

    def give(self, part: _Part) -> int:
        """Start the copy to a part's place. Returns its bytes."""
        numbers, place = self.numbers(part), part.place
        if place.dtype != part.dtype:  # converted where it is needed, not by the host
            numbers = numbers.to(place.device, non_blocking=True)
        place.copy_(numbers, non_blocking=True)
        if part.last is not None:
            target, whole = part.last
            target.copy_(whole.view(target.shape))
        if self._copied is not None:
            self._copied.record()
        return place.numel() * part.dtype.itemsize

    def wait(self) -> None:
        """Wait until nothing copies from it any more."""
        if self._copied is not None:
            self._copied.synchronize()


def stage(wanted: Sequence[tuple[Stored, torch.Tensor]], device: torch.device, *, piece: int = _PIECE) -> Iterator[int]:
    """Fill each tensor on `device` with the numbers that are stored for it, in its own dtype and strides.

    Beyond the tensors it takes `_BUFFERS` times `piece` bytes of host memory, and on the device the numbers of one
    tensor where that has gaps. Yields the bytes of each piece when its copy has begun; all are there when it ends.
    Raises ModelError for a file that ends early.
    """
    yield from _staged(wanted, device, piece)
    if device.type == "cuda":
        _empty_host_cache()


def _empty_host_cache() -> None:
    """Give page-locked memory that is not in use any more back to the system, where torch has a way: it would keep it
    for as long as the process runs.
    """
    empty: Callable[[], None] | None = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()


def _staged(wanted: Sequence[tuple[Stored, torch.Tensor]], device: torch.device, piece: int) -> Iterator[int]:
    """As `stage`. Its buffers are free when it has ended."""
    buffers = [_Buffer(piece, device) for _ in range(_BUFFERS)]
    reading: deque[tuple[Future[None], _Buffer, _Part]] = deque()

    def landed() -> int:
        future, buffer, part = reading.popleft()
        future.result()
        return buffer.give(part)

    with ExitStack() as files, ThreadPoolExecutor(_READERS, "read-weights") as readers:
        opened: dict[Path, int] = {}
        for buffer, part in zip(cycle(buffers), _parts(wanted, piece), strict=False):
            if len(reading) == _READERS:
                yield landed()
            if part.file not in opened:
                opened[part.file] = files.enter_context(part.file.open("rb", buffering=0)).fileno()
            buffer.wait()
            view = buffer.numbers(part).view(torch.uint8).numpy().data
            reading.append((readers.submit(_read, part.file, opened[part.file], view, part.start), buffer, part))
        while reading:
            yield landed()
    for buffer in buffers:
        buffer.wait()


def _parts(wanted: Sequence[tuple[Stored, torch.Tensor]], piece: int) -> Iterator[_Part]:
    """Cut tensors into parts that fit into a buffer. One with gaps is put together apart, and then copied whole."""
    for stored, target in wanted:
        whole = target.is_contiguous()
        flat = (
            target.detach().view(-1) if whole else torch.empty(target.numel(), dtype=stored.dtype, device=target.device)
        )
        size, step = stored.dtype.itemsize, piece // stored.dtype.itemsize
        count = math.prod(stored.shape)
        for first in range(0, count, step):
            part = _Part(stored.file, stored.start + first * size, stored.dtype, flat[first : first + step])
            if not whole and first + step >= count:
                part.last = (target.detach(), flat)
            yield part


def _read(file: Path, descriptor: int, view: memoryview, start: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], start)
        if not count:
            raise ModelError(f"'{file}' ended early; it was changed while it was read")
        view, start = view[count:], start + count
