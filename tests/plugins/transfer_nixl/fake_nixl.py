"""NIXL's agents within this process: bytes move a little whenever a transfer's state is asked for."""

from __future__ import annotations

import ctypes
import secrets
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

AT_ONCE = 2**20


@dataclass(eq=False)
class Shared:
    """What others use of an agent. It closes when the last reference to the agent goes, as NIXL's do: also a
    transfer's. The lock is held while bytes are copied.
    """

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False


agents: dict[str, Shared] = {}
"""By name."""


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - the plugin knows it by its name
    pass


class nixl_agent_config:  # noqa: N801
    def __init__(self, enable_prog_thread: bool, backends: list[str]) -> None:
        self.backends = backends


@dataclass(eq=False)
class FakeTransfer:
    agent: FakeAgent
    remote: str
    pieces: list[tuple[int, int, int]]
    """Here, there and bytes, the next one last."""
    posted: bool = False
    over: bool = False

    def release(self) -> None:
        self.over = True


class FakeAgent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name = name
        self.shared = agents[name] = Shared()
        self.memory: list[tuple[int, int]] = []
        self.known: dict[str, bytes] = {}

    def __del__(self) -> None:
        with self.shared.lock:
            self.shared.closed = True

    def create_backend(self, backend: str, settings: dict[str, str]) -> None:
        assert backend == "UCX"

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> None:
        assert kind == "DRAM"
        self.memory += [(address, nbytes) for address, nbytes, _, _ in places]

    def get_agent_metadata(self) -> bytes:
        return self.shared.secret + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata[8:]
        self.known[name.decode()] = metadata[:8]
        return name

    def remove_remote_agent(self, name: str) -> None:
        del self.known[name]

    def get_xfer_descs(self, descs: NDArray[np.uint64], kind: str) -> NDArray[np.uint64]:
        assert descs.dtype == np.uint64
        assert descs.shape[1] == 3
        return descs

    def initialize_xfer(
        self, operation: str, here: NDArray[np.uint64], there: NDArray[np.uint64], remote: str
    ) -> FakeTransfer:
        assert operation == "READ"
        assert (here[:, 1] == there[:, 1]).all(), "the sides are not cut alike"
        self._check(here, self.memory)
        pieces = list(zip(here[:, 0].tolist(), there[:, 0].tolist(), here[:, 1].tolist(), strict=True))
        return FakeTransfer(self, remote, pieces[::-1])

    def transfer(self, handle: FakeTransfer) -> str:
        with self._peer(handle).lock:
            handle.posted = True
        return "PROC"

    def check_xfer_state(self, handle: FakeTransfer) -> str:
        assert handle.posted
        assert not handle.over, "a transfer is asked for that has ended"
        moved = 0
        with self._peer(handle).lock:
            self._peer(handle)
            while handle.pieces and moved < AT_ONCE:
                here, there, nbytes = handle.pieces.pop()
                ctypes.memmove(here, there, nbytes)
                moved += nbytes
        handle.over = not handle.pieces
        return "DONE" if handle.over else "PROC"

    def _peer(self, handle: FakeTransfer) -> Shared:
        peer = agents[handle.remote]
        if peer.closed or self.known.get(handle.remote) != peer.secret:
            handle.over = True
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        return peer

    def _check(self, descs: NDArray[np.uint64], memory: list[tuple[int, int]]) -> None:
        begins, ends = descs[:, 0].astype(np.int64), (descs[:, 0] + descs[:, 1]).astype(np.int64)
        inside = np.zeros(len(descs), bool)
        for address, nbytes in memory:
            inside |= (begins >= address) & (ends <= address + nbytes)
        assert inside.all(), "memory that is not registered"


nixl_agent = FakeAgent


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this imported as NIXL until a test's end."""
    monkeypatch.setitem(sys.modules, "nixl", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "nixl._api", sys.modules[__name__])
