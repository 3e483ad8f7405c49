"""Agent: NIXL's agents, used by one thread at a time, and the peers that are known."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.plugins.kv_handoff.api.transfer import TransferError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.transfer import Region
    from pegboard.plugins.transfer_nixl.options import NixlOptions

BACKEND = "UCX"


class Handle(Protocol):
    """NIXL's handle of a transfer."""

    def release(self) -> None: ...


class Library(Protocol):
    """What is used of `nixl_agent`. States are DONE, PROC and ERR; what goes wrong is raised as well."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...  # noqa: N803

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...

    def remove_remote_agent(self, agent: str) -> None: ...

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object: ...

    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> Handle: ...

    def transfer(self, handle: Handle) -> str: ...

    def check_xfer_state(self, handle: Handle) -> str: ...


def library(name: str, progress: bool) -> Library:
    """Return a new agent of this name, with or without a thread of its own, and without a backend. Raises
    ImportError.
    """
    from nixl._api import nixl_agent, nixl_agent_config

    made: Library = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=[]))
    return made


@dataclass
class Known:
    """A peer: how many links read from it, how many transfers are under way, and whether the connection is lost."""

    metadata: bytes
    users: int = 0
    under_way: int = 0
    lost: bool = False


@dataclass(eq=False)
class Transfer:
    """Descriptors uint64 [n, 3] that are under way: address, bytes, device."""

    peer: str
    handle: Handle


def memory_of(device: str) -> tuple[str, int]:
    """Return NIXL's kind of memory and the number of a device, as torch spells it. Raises ValueError."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda":
        return "VRAM", int(number or 0)
    raise ValueError(f"NIXL reads memory of the host and of CUDA devices, not of {device!r}")


class Agent:
    """Registers the regions, and reads. There are two of NIXL's agents. One serves peers, in a thread of its own. The
    other one reads, and does nothing unless it is asked: where a thread notices the end of a connection while another
    one begins a transfer, UCX ends the process.

    A peer is known under NIXL's name for it, which no two runs share; two links may read from the same one. NIXL mixes
    up transfers of a peer that is forgotten meanwhile, so it is told to forget one only when nothing is under way.
    """

    def __init__(self, regions: Sequence[Region], options: NixlOptions) -> None:
        self.name = f"pegboard-{secrets.token_hex(8)}"
        self.memory = memory_of(regions[0].device)[0] if regions else "DRAM"
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        self._server: Library | None = self._made(self.name, regions, options, progress=True)
        self._agent: Library | None = self._made(f"{self.name}-reader", regions, options, progress=False)
        self.metadata = self._server.get_agent_metadata()

    def _made(self, name: str, regions: Sequence[Region], options: NixlOptions, progress: bool) -> Library:
        agent = library(name, progress)
        settings = {"engine_config": ",".join(f"{key}={value}" for key, value in options.ucx.items())}
        agent.create_backend(BACKEND, settings | ({"device_list": options.devices} if options.devices else {}))
        places = [(one.address, one.nbytes, memory_of(one.device)[1], "") for one in regions if one.nbytes]
        if places:
            agent.register_memory(places, self.memory)
        return agent

    def know(self, name: str, metadata: bytes) -> None:
        """Get to know a peer, or once more where the connection was lost. Raises TransferError."""
        with self._lock:
            agent = self._open_agent()
            known, users = self._known.get(name), 0
            if known is not None and known.metadata != metadata:
                raise TransferError("another peer has the same name")
            if known is not None and known.lost and not known.under_way:
                users = known.users
                self._forget(agent, name)
            if name not in self._known:
                self._add(agent, name, metadata)
            self._known[name].users += users + 1

    def leave(self, name: str) -> None:
        """Take note that one link less reads from a peer."""
        with self._lock:
            known = self._known.get(name)
            if known is not None and self._agent is not None:
                known.users -= 1
                if known.users <= 0 and not known.under_way:
                    self._forget(self._agent, name)

    def begin(self, name: str, here: NDArray[np.uint64], there: NDArray[np.uint64], memory: str) -> Transfer:
        """Begin to read descriptors `there` of a peer into `here`. Raises TransferError."""
        with self._lock:
            agent, known = self._open_agent(), self._known.get(name)
            if known is None or known.lost:
                raise TransferError("the connection to the peer is lost")
            try:
                local, remote = agent.get_xfer_descs(here, self.memory), agent.get_xfer_descs(there, memory)
                handle = agent.initialize_xfer("READ", local, remote, name)
                state = agent.transfer(handle)
            except Exception as error:
                known.lost |= _is_lost(error)
                raise TransferError(f"NIXL cannot read from the peer: {error}") from error
            if state == "ERR":
                raise TransferError("NIXL cannot read from the peer")
            known.under_way += 1
            return Transfer(name, handle)

    def ended(self, transfer: Transfer) -> bool:
        """Return whether all bytes are there. Raises TransferError where they do not come.

        A transfer fails with its connection, which UCX has closed by then, so nothing more is written.
        """
        with self._lock:
            try:
                state, why = self._open_agent().check_xfer_state(transfer.handle), ""
            except TransferError:
                raise
            except Exception as error:
                self._known[transfer.peer].lost |= _is_lost(error)
                state, why = "ERR", f": {error}"
            if state == "PROC":
                return False
            self._known[transfer.peer].under_way -= 1
            with contextlib.suppress(Exception):
                transfer.handle.release()
            if state != "DONE":
                raise TransferError(f"the read has failed{why}")
            return True

    def drop(self, transfers: Sequence[Transfer]) -> None:
        """Let go of transfers that are under way: only before `close`, which ends them for good."""
        with self._lock:
            for one in transfers:
                with contextlib.suppress(Exception):
                    one.handle.release()

    def close(self) -> None:
        """End the agents, their connections and the thread. After `drop` nothing else refers to them."""
        with self._lock:
            self._agent = self._server = None

    def _open_agent(self) -> Library:
        if self._agent is None:
            raise TransferError("the engine is closed")
        return self._agent

    def _add(self, agent: Library, name: str, metadata: bytes) -> None:
        try:
            found = agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL cannot use the peer's description: {error}") from error
        said = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
        if said != name:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(said)
            raise TransferError("the peer's description names two peers")
        self._known[name] = Known(metadata)

    def _forget(self, agent: Library, name: str) -> None:
        del self._known[name]
        with contextlib.suppress(Exception):  # where the connection was lost, NIXL may have forgotten it before
            agent.remove_remote_agent(name)


def _is_lost(error: Exception) -> bool:
    return type(error).__name__ == "nixlRemoteDisconnectError"
