"""New weights that a trainer broadcasts in a process group of torch, in which this server is one of the ranks."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, TCPStore

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.weight_updates.source import Offered

if TYPE_CHECKING:
    from pegboard.plugins.weight_updates.messages import Announced, Meeting

_TRAINER = 0
_FLOATS = {
    str(one).removeprefix("torch."): one for one in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}


class TrainerGroup:
    """The connections to a trainer's ranks. Nothing of torch's global state is used.

    The store's prefixes are those of `torch.distributed.init_process_group` for a group with a name, and of what
    trainers derive from it (`init_custom_process_group`), so that both sides find each other.
    """

    def __init__(self, meeting: Meeting, device: torch.device, timeout: float) -> None:
        """Wait for all ranks, for `timeout` seconds. Raises ModelError."""
        self.name = meeting.name
        self.device = device
        self.closed = False
        if problem := _objection(meeting.backend, device):
            raise ModelError(problem)
        patience = timedelta(seconds=timeout)
        try:
            tcp = TCPStore(meeting.address, meeting.port, meeting.size, is_master=False, timeout=patience)
            store = PrefixStore(f"{meeting.name}/", PrefixStore(meeting.name, tcp))
            self._group = dist.ProcessGroup(store, meeting.rank, meeting.size)
            self._add_backend(PrefixStore(f"{device.type}/", store), meeting, patience)
        except RuntimeError as error:
            raise ModelError(
                f"the ranks of {meeting.name!r} did not meet at {meeting.address}:{meeting.port} within {timeout:g} s: "
                f"{_first_line(error)}"
            ) from error

    def _add_backend(self, store: PrefixStore, meeting: Meeting, patience: timedelta) -> None:
        if self.device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend: Backend = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, patience)
        else:
            kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            backend = dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
        self._group._register_backend(self.device, kind, backend)
        self._group._set_default_backend(kind)

    def receive(self, memory: torch.Tensor) -> dist.Work:
        """Begin to receive what the trainer broadcasts next. Raises ModelError."""
        if self.closed:
            raise ModelError(f"the group {self.name!r} is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _TRAINER, 0
        try:
            return self._group.broadcast([memory], options)
        except RuntimeError as error:
            raise ModelError(f"the group {self.name!r} has failed: {_first_line(error)}") from error

    def close(self) -> None:
        """End the connections. What is under way ends with them, or with its timeout: nothing waits for that."""
        if not self.closed:
            self.closed = True
            threading.Thread(target=_let_go, args=([self.__dict__.pop("_group")],), daemon=True).start()


def _let_go(groups: list[object]) -> None:
    groups.clear()


def _objection(backend: str, device: torch.device) -> str | None:
    wanted = "gloo" if device.type == "cpu" else "nccl"
    if backend not in ("auto", wanted):
        return f"the backend {backend!r} does not reach weights on {device}; use {wanted}"
    there = dist.is_available() and (dist.is_gloo_available() if wanted == "gloo" else dist.is_nccl_available())
    return None if there else f"this torch was built without {wanted}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


@dataclass(slots=True)
class _Arriving:
    """A tensor that is under way, and where it goes."""

    name: str
    memory: torch.Tensor
    work: dist.Work
    since: float


class GroupSource:
    """The tensors that a trainer has announced, which it broadcasts in that order."""

    origin = None

    def __init__(self, group: TrainerGroup, announced: Announced, most: int, timeout: float) -> None:
        """`most` numbers may be in a tensor; `timeout` seconds may pass until one has come. Raises ModelError."""
        self._group = group
        self._timeout = timeout
        self._arriving: _Arriving | None = None
        self._offered = _offered(announced, most)
        self._left = collections.deque(self._offered)

    @property
    def tensors(self) -> Mapping[str, Offered]:
        return self._offered

    def wait(self) -> None:
        while not self._came(None):
            time.sleep(0.005)

    def read(self, name: str, memory: torch.Tensor | None) -> torch.Tensor | None:
        while self._left[0] != name:
            # Not needed, but broadcast.
            if not self._came(None):
                return None
            self._next()
        return self._next() if self._came(memory) else None

    def changed(self) -> str:
        return ""

    def through(self) -> bool:
        while self._left:
            if not self._came(None):
                return False
            self._next()
        return True

    def close(self) -> None:
        if self._left:
            # The trainer sends on, or fails: what comes next could be anything.
            self._group.close()

    def _came(self, memory: torch.Tensor | None) -> bool:
        """Return whether the next tensor is there, and begin to receive it, into `memory` if it has the right type."""
        if self._arriving is None:
            name = self._left[0]
            offered = self._offered[name]
            if memory is None or memory.dtype != offered.dtype:
                memory = torch.empty(offered.shape, dtype=offered.dtype, device=self._group.device)
            # Before it begins, since torch gives up after the same time.
            since = time.monotonic()
            self._arriving = _Arriving(name, memory, self._group.receive(memory), since)
        one = self._arriving
        over = time.monotonic() - one.since >= self._timeout
        if not one.work.is_completed() and not over:
            return False
        try:
            if one.work.is_completed():
                one.work.wait()
                return True
        except RuntimeError as error:
            if not over:
                raise ModelError(f"{one.name} has not come from {self._group.name!r}: {_first_line(error)}") from error
        raise ModelError(f"{one.name} has not come within {self._timeout:g} s from {self._group.name!r}")

    def _next(self) -> torch.Tensor:
        assert self._arriving is not None, "it has come"
        memory, self._arriving = self._arriving.memory, None
        self._left.popleft()
        return memory


def _offered(announced: Announced, most: int) -> dict[str, Offered]:
    found: dict[str, Offered] = {}
    for name, dtype, shape in announced.tensors:
        if name in found:
            raise ModelError(f"{name} is announced twice")
        kind = _FLOATS.get(dtype.removeprefix("torch."))
        if kind is None:
            raise ModelError(f"{name} is announced as {dtype!r:.100}; use one of {', '.join(sorted(_FLOATS))}")
        if math.prod(shape) > most:
            raise ModelError(f"{name} is announced as {list(shape)!r:.200}: no tensor of this model is as large")
        found[name] = Offered(tuple(shape), kind, "")
    if not found:
        raise ModelError("there are no tensors")
    return found
