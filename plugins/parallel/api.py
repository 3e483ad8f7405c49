"""Contract: ranks, what they compute together and what starts them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Component, OptionsT
from pegboard.toolkit.system.cores import usable_cores

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CommunicatorContext:
    """Rank `index` of `size`, whose tensors are on `device`."""

    size: int
    index: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ranks on several machines meet: rank 0 listens at `host` and `port`, by `listener`, which only it has and
    which stays its caller's. `own` is the address of this rank's machine, by which the others reach it.
    """

    host: str
    port: int
    own: str
    listener: socket.socket | None = None


class Communicator(Component[OptionsT, CommunicatorContext]):
    """What ranks compute together, and send each other. All of them call `all_reduce`, `gather` and `broadcast` in the
    same order, with tensors of the same shape and type; `send` and `receive` are for two of them, and come between the
    same calls of all on both sides. One thread of each rank calls them, but one may `receive` while another one does
    `send`. Where a rank ends, what the others wait for raises soon.
    """

    @abc.abstractmethod
    def connect(self, meeting: Path, timeout: float) -> None:
        """Meet the other ranks: once, before all else, by a directory that is theirs alone. Raises PegboardError where
        they have not come after `timeout` seconds. No call after it may wait longer, either.
        """

    def connect_machines(self, meeting: Rendezvous, timeout: float) -> None:
        """As `connect`, for ranks on several machines: capability `machines`."""
        raise Unsupported(type(self).__name__, "machines")

    @abc.abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, float32 of any shape: the same bits on each rank. May change x and return
        it.
        """

    @abc.abstractmethod
    def gather(self, x: Tensor) -> Tensor | None:
        """Return all ranks' x float32 [n, m], in their order, as [n, ranks * m] on rank 0; None on the others."""

    @abc.abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x int64 [n]; what the others give has its shape. May change x on the others, and return
        it.
        """

    @abc.abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Send x, of any shape and type, to another rank, which receives in the same order what is sent to it. May wait
        until the other rank receives it. x may change once this returns.
        """

    @abc.abstractmethod
    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for what another rank sends next to this one, a tensor of the shape and type of x. May fill x, if it is
        contiguous, and return it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the others. May be called again, and without `connect`."""

    @property
    def shares_memory(self) -> bool:
        """Whether it has `region` and `check_others`: capability `shared_memory`."""
        return type(self).region is not Communicator.region

    def region(self, nbytes: int) -> Tensor:
        """Return memory uint8 [nbytes], more than 0, that all ranks map, zeros at first. Native code may write and read
        there. All ranks call it at the same place, with the same number; each call returns another memory, which lives
        as long as one of its tensors. Capability `shared_memory`.
        """
        raise Unsupported(type(self).__name__, "shared_memory")

    def check_others(self, waited: float) -> None:
        """Look after the other ranks, for native code that has waited for them in a region for `waited` seconds. Raises
        RuntimeError where one has left or ended, and TimeoutError where no call may wait so long. It may be called in
        any thread, and by one rank alone. Capability `shared_memory`.
        """
        raise Unsupported(type(self).__name__, "shared_memory")


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """`size` ranks share `cores` of this machine, None: those that this process may use. Each runs ``python -m
    module``. `machines` says whether their communicator reaches other machines.
    """

    size: int
    cores: int | None
    module: str
    machines: bool = False

    @property
    def all_cores(self) -> int:
        """Cores that the ranks share."""
        return usable_cores() if self.cores is None else self.cores

    @property
    def threads(self) -> int:
        """Threads that each rank computes with, where all are on this machine."""
        return max(1, self.all_cores // self.size)

    def too_few_cores(self) -> str | None:
        """Return None where each rank has a core, else what to do."""
        if self.size <= self.all_cores:
            return None
        return (
            f"parallel.tensor times parallel.pipeline: {self.size} ranks take a core each, and there are "
            f"{self.all_cores}; lower one, or set parallel.cores to {self.size} to let ranks share cores"
        )


class RankHandle(abc.ABC):
    """A rank that was started. `connection` is our end of the socket between it and this process; its user closes
    it. `host` is the address of the rank's machine, "" for this one.
    """

    connection: socket.socket
    host: str = ""

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Its process."""

    @abc.abstractmethod
    def died(self, seconds: float) -> str | None:
        """Wait so long for its end. Return how it ended, for a sentence that begins with it; None: it runs."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it, and wait until it has ended. May be called again."""


class RankLauncher(Component[OptionsT, LaunchContext]):
    """Starts ranks. One that starts them on other machines (capability `machines`) listens at `address`, host and
    port; there it ends any connection that does not prove within seconds that it is one of its ranks, and reads
    nothing else of it.
    """

    address: tuple[str, int] | None = None

    @abc.abstractmethod
    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        """Start a rank with `line(file)` on its standard input, which stays open as long as this process lives. `file`
        is the number that the rank's end of the socket between the two has there. Raises PegboardError where the rank
        cannot be started.
        """

    def close(self) -> None:  # optional
        """Once all ranks have ended: undo what it changed in this process."""
