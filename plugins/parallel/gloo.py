"""The communicator `gloo`: torch's library for CPUs, over TCP, on this machine or between several."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel.api import Communicator, CommunicatorContext, Rendezvous

if TYPE_CHECKING:
    from pathlib import Path

_INTERFACE = "lo"


class Gloo(Communicator[NoOptions]):
    """A process group of its own: nothing of torch's global state is used, so that several may be in one process."""

    def __init__(self, options: NoOptions, ctx: CommunicatorContext) -> None:
        super().__init__(options, ctx)
        self._group: dist.ProcessGroup | None = None

    @classmethod
    def supports(cls, options: NoOptions, ctx: CommunicatorContext) -> str | None:
        """Return None on a CPU."""
        if ctx.device.type != "cpu":
            return f"gloo is for CPUs, and the model is on {ctx.device}"
        return None if dist.is_available() and dist.is_gloo_available() else "this torch was built without gloo"

    def connect(self, meeting: Path, timeout: float) -> None:
        store = FileStore(str(meeting / "gloo"), self.ctx.size)
        self._meet(store, timeout, interface=_INTERFACE)

    def connect_machines(self, meeting: Rendezvous, timeout: float) -> None:
        listener = None if meeting.listener is None else os.dup(meeting.listener.fileno())  # the store closes it
        try:
            store = TCPStore(
                meeting.host,
                meeting.port,
                self.ctx.size,
                is_master=listener is not None,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            raise PegboardError(f"rank {self.ctx.index} cannot meet the others: {error}") from error
        self._meet(store, timeout, hostname=meeting.own)

    def _meet(self, store: Store, timeout: float, **device: str) -> None:
        """Meet the others by a store, and listen for them at the interface or the address that `device` names."""
        gloo, size, index = dist.ProcessGroupGloo, self.ctx.size, self.ctx.index
        options = vars(gloo)["_Options"]()  # torch's stubs call it otherwise
        options._timeout = timedelta(seconds=timeout)
        store.set_timeout(timedelta(seconds=timeout))
        try:
            options._devices = [gloo.create_device(**device)]
            backend = gloo(store, index, size, options)
        except RuntimeError as error:
            raise PegboardError(f"rank {index} cannot meet the others: {error}") from error
        self._group = dist.ProcessGroup(store, index, size)
        self._group._register_backend(self.ctx.device, dist.ProcessGroup.BackendType.GLOO, backend)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    @property
    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(f"rank {self.ctx.index} of {self.ctx.size} is not connected to the others")
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._joined.allreduce([x], dist.AllreduceOptions()).wait()
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        x, options = x.contiguous(), dist.GatherOptions()
        options.rootRank = 0
        if self.ctx.index:
            self._joined.gather([], [x], options).wait()
            return None
        parts = [torch.empty_like(x) for _ in range(self.ctx.size)]
        self._joined.gather([parts], [x], options).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        x, options = x.contiguous(), dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._joined.broadcast([x], options).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self._joined.send([x.contiguous()], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        self._joined.recv([x], source, 0).wait()
        return x

    def close(self) -> None:
        self._group = None
