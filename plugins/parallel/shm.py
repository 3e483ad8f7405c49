"""The communicator `shm`: memory that all ranks of one machine map.

Each rank has two slots there, used in turn, and a counter of its calls. A call writes the rank's own slot, counts, and
reads the others' slots once their counters have come as far. Sums add slots in the order of ranks, so all ranks get the
same bits. For what one rank sends to another there is a ring of slots, with a counter at each end.

A counter is stored after the slot that it tells of, and read before it, without fences: x86 keeps both in that order
for other cores (Intel SDM, volume 3, 9.2.2), other CPUs do not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel.api import Communicator, CommunicatorContext

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "region"
_X86 = ("x86_64",)
_SLOT = 256 * 2**10
"""Bytes of a slot; larger tensors go in pieces. Two slots of two ranks fit into the L2 cache of a core."""
_RING = 4
"""Slots of a ring: what fits into them is sent without a wait for the other rank."""
_KEPT = 512
"""Sizes of tensors whose views are kept."""
_LINE = 64
"""Bytes of a cache line. Each rank has one of its own, in words of 8 bytes."""
_COUNT, _PID, _LEFT, _SLEEPS = 0, 1, 2, 3
"""Words of a rank's line. How many calls it has begun, plus one for having come; the number of its process; whether it
has left; whether it sleeps and wants to be woken."""
_SENT, _TAKEN, _SENDS, _RECEIVES = 0, 1, 2, 3
"""Words of the line that a rank has for each other rank: how many slots of their rings it has written, and read; and
whether it sleeps until there is room, or until there is something to read.
"""
_WORDS = _LINE // 8
_LOOKS = 100
"""Looks at a counter before a rank lets others have its core: about 5 µs. Where two ranks share a core, more looks only
keep the other one from it."""
_NAP_NS = 2_000_000
"""How long a rank sleeps at most before it looks again."""
_CHECK_SECONDS = 0.2
"""How often a rank that waits looks whether the others' processes run."""

_FUTEX, _WAIT, _WAKE = 202, 0, 1
"""The system call of x86-64 and two of its operations (man 2 futex): sleep while a number in memory has a value, and
wake up those that do."""
_libc = ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Time(0, _NAP_NS)


class Shm(Communicator[NoOptions]):
    """Ranks on one machine; no file or name of the memory is left, however they end."""

    def __init__(self, options: NoOptions, ctx: CommunicatorContext) -> None:
        super().__init__(options, ctx)
        self._calls = 0
        self._all = [rank * _WORDS + _COUNT for rank in range(ctx.size)]
        self._own = self._all[ctx.index]
        self._timeout = 0.0
        self._start = 0
        self._slots = torch.empty(0)
        self._floats: list[Tensor] = []
        self._known: dict[int, list[tuple[Tensor, ...]]] = {}
        self._rings = torch.empty(0)
        self._lines: memoryview[int] | None = None

    @classmethod
    def supports(cls, options: NoOptions, ctx: CommunicatorContext) -> str | None:
        """Return None on an x86 CPU with Linux."""
        if ctx.device.type != "cpu":
            return f"it is for CPUs, and the model is on {ctx.device}"
        if platform.machine() not in _X86 or not hasattr(os, "memfd_create"):
            return f"it needs an x86-64 CPU and Linux, and this is {platform.machine()} with {sys.platform}"
        return None

    def connect(self, meeting: Path, timeout: float) -> None:
        size, index, self._timeout = self.ctx.size, self.ctx.index, timeout
        deadline, file = time.monotonic() + timeout, meeting / _FILE
        head, slots_end = size * (1 + size) * _LINE, 2 * size * _SLOT
        total = head + slots_end + size * size * _RING * _SLOT
        if index == 0:
            region = _memory(total)
            (meeting / "new").write_text(_place_of(os.getpid(), region))
            (meeting / "new").rename(file)
        else:
            region = self._open(file, deadline)
        try:
            memory = mmap.mmap(region, total)
            lines = self._lines = memoryview(memory)[:head].cast("q")
            slots = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
            self._start = slots.data_ptr() - head
            self._slots = slots[:slots_end].view(2, size, _SLOT)
            self._rings = slots[slots_end:].view(size, size, _RING, _SLOT)
            self._floats = list(self._slots.view(torch.float32))
            lines[index * _WORDS + _PID] = os.getpid()
            self._calls = lines[self._own] = 1
            self._wait(self._all, 1)
        except TimeoutError as error:
            raise PegboardError(f"rank {index} cannot meet the others: {error}") from error
        finally:
            os.close(region)  # rank 0's: all have opened it

    def _open(self, file: Path, deadline: float) -> int:
        """Return the open memory of rank 0."""
        while not file.exists():
            if time.monotonic() > deadline:
                raise PegboardError(f"rank {self.ctx.index} cannot meet the others: rank 0 has not come")
            time.sleep(0.005)
        try:
            return os.open(file.read_text(), os.O_RDWR)
        except OSError as error:
            raise PegboardError(f"rank {self.ctx.index} cannot open the memory of rank 0: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        flat = x.view(-1)
        for start in range(0, max(1, flat.shape[0]), _SLOT // 4):
            piece = flat[start : start + _SLOT // 4]
            slot = self._begin()
            slots = self._views(piece.shape[0])[slot]
            slots[self.ctx.index].copy_(piece)
            self._tell()
            self._wait(self._all, self._calls)
            torch.add(slots[0], slots[1], out=piece)
            for more in slots[2:]:
                piece += more
        return x

    def _views(self, count: int) -> list[tuple[Tensor, ...]]:
        """Return the beginnings of all slots, so many numbers float32 each; kept, since slicing takes half the time."""
        if (found := self._known.get(count)) is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[count] = [slots[:, :count].unbind() for slots in self._floats]
        return found

    def gather(self, x: Tensor) -> Tensor | None:
        x, index = x.contiguous(), self.ctx.index
        parts = [x, *(torch.empty_like(x) for _ in range(1, 1 if index else self.ctx.size))]
        for start, stop in _pieces(x):
            slots, length = self._slots[self._begin()], stop - start
            if index:
                slots[index, :length] = _bytes(x)[start:stop]
            self._tell()
            if index == 0:
                self._wait(self._all, self._calls)
            for rank, part in enumerate(parts[1:], 1):
                _bytes(part)[start:stop] = slots[rank, :length]
        return None if index else torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        x, index = x.contiguous(), self.ctx.index
        for start, stop in _pieces(x):
            slot = self._slots[self._begin(), 0, : stop - start]
            if index == 0:
                slot[:] = _bytes(x)[start:stop]
            self._tell()
            if index:
                self._wait(self._all[:1], self._calls)
                _bytes(x)[start:stop] = slot
        return x

    def send(self, x: Tensor, to: int) -> None:
        x, own, theirs = x.contiguous(), self._place(self.ctx.index, to, _SENT), self._place(to, self.ctx.index, _TAKEN)
        for start, stop in _pieces(x):
            lines = self._connected
            count = lines[own]
            self._wait_for(theirs, count - _RING + 1, to, self._place(self.ctx.index, to, _SENDS))
            self._rings[self.ctx.index, to, count % _RING, : stop - start] = _bytes(x)[start:stop]
            self._count(lines, own, self._place(to, self.ctx.index, _RECEIVES))

    def receive(self, x: Tensor, source: int) -> Tensor:
        x, index = x.contiguous(), self.ctx.index
        own, theirs = self._place(index, source, _TAKEN), self._place(source, index, _SENT)
        for start, stop in _pieces(x):
            lines = self._connected
            count = lines[own]
            self._wait_for(theirs, count + 1, source, self._place(index, source, _RECEIVES))
            _bytes(x)[start:stop] = self._rings[source, index, count % _RING, : stop - start]
            self._count(lines, own, self._place(source, index, _SENDS))
        return x

    def _place(self, rank: int, other: int, word: int) -> int:
        """Return the place of a word of the line that a rank has for another one."""
        return (self.ctx.size * (1 + rank) + other) * _WORDS + word

    def _count(self, lines: memoryview[int], place: int, sleeps: int) -> None:
        """Add 1 to a word, and wake the other rank if its word at `sleeps` says so."""
        lines[place] += 1
        if lines[sleeps]:
            self._wake(place)

    def _wait_for(self, place: int, count: int, rank: int, sleeps: int) -> None:
        """Wait until a word of that rank's has come to `count`, as `_wait` does."""
        lines, looks = self._connected, 0
        while lines[place] < count and looks < _LOOKS:
            looks += 1
        if lines[place] < count:
            self._wait_long(lines, place, count, rank, sleeps)

    def close(self) -> None:
        if self._lines is not None:
            self._lines[self.ctx.index * _WORDS + _LEFT] = 1
        self._lines, self._slots, self._rings, self._floats = None, torch.empty(0), torch.empty(0), []
        self._known.clear()  # with the last of its tensors the memory goes

    def region(self, nbytes: int) -> Tensor:
        file = _memory(nbytes) if self.ctx.index == 0 else -1
        pid, theirs = self.broadcast(torch.tensor([os.getpid(), file])).tolist()
        if self.ctx.index:
            file = os.open(_place_of(pid, theirs), os.O_RDWR)
        try:
            memory = mmap.mmap(file, nbytes)
            self.all_reduce(torch.zeros(1))  # all have opened it
        finally:
            os.close(file)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def check_others(self, waited: float) -> None:
        lines = self._connected
        for rank in range(self.ctx.size):
            if lines[rank * _WORDS + _LEFT]:
                raise RuntimeError(f"rank {rank} has left")
            self._check_runs(lines, rank)
        if waited > self._timeout:
            raise TimeoutError(f"another rank has not come after {self._timeout:g} s")

    def _check_runs(self, lines: memoryview[int], rank: int) -> None:
        pid = lines[rank * _WORDS + _PID]
        if pid and not _runs(pid):
            raise RuntimeError(f"rank {rank} has ended")

    def _begin(self) -> int:
        """Begin a call: return which of the two slots is its own. All have read what was in there two calls ago, once
        they have begun the call before this one.
        """
        self._wait(self._all, self._calls)
        self._calls += 1
        return self._calls % 2

    def _tell(self) -> None:
        lines = self._lines
        assert lines is not None, "the call was begun"
        lines[self._own] = self._calls
        for place in self._all:
            if lines[place + _SLEEPS]:
                self._wake(self._own)
                return

    def _wake(self, place: int) -> None:
        _libc.syscall(_FUTEX, self._address(place), _WAKE, 2**31 - 1, None, None, 0)

    def _wait(self, counters: list[int], calls: int) -> None:
        """Wait until these ranks have begun so many calls. Raises RuntimeError where one of them has left or ended, and
        TimeoutError.
        """
        lines = self._connected
        for place in counters:
            looks = 0
            while lines[place] < calls and looks < _LOOKS:
                looks += 1
            if lines[place] < calls:
                self._wait_long(lines, place, calls, place // _WORDS, self._own + _SLEEPS)

    @property
    def _connected(self) -> memoryview[int]:
        if self._lines is None:
            raise RuntimeError(f"rank {self.ctx.index} of {self.ctx.size} is not connected to the others")
        return self._lines

    def _wait_long(self, lines: memoryview[int], place: int, calls: int, rank: int, sleeps: int) -> None:
        began = checked = time.monotonic()
        lines[sleeps] = 1
        while (count := lines[place]) < calls:
            # A rank that counts between these two lines has seen that this one sleeps; or else the nap is short.
            _libc.syscall(_FUTEX, self._address(place), _WAIT, ctypes.c_uint32(count), ctypes.byref(_NAP), None, 0)
            if lines[rank * _WORDS + _LEFT] and lines[place] < calls:
                raise RuntimeError(f"rank {rank} has left")
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._check_runs(lines, rank)
            if now - began > self._timeout:
                raise TimeoutError(f"rank {rank} has not come after {self._timeout:g} s")
        lines[sleeps] = 0

    def _address(self, place: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._start + 8 * place)


def _memory(nbytes: int) -> int:
    """Return a file of memory that has no name."""
    file = os.memfd_create("pegboard-ranks")
    os.ftruncate(file, nbytes)
    return file


def _place_of(pid: int, file: int) -> str:
    """Return by which name other processes open a file of that process."""
    return f"/proc/{pid}/fd/{file}"


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _pieces(x: Tensor) -> Iterator[tuple[int, int]]:
    total = x.numel() * x.element_size()
    return ((start, min(start + _SLOT, total)) for start in range(0, total, _SLOT))


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
