"""Mooncake's transfer engines within this process: a piece moves when its state is asked for."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from dataclasses import dataclass, field
from types import ModuleType

import pytest

MOST = 1024
"""Pieces of one peer that are under way."""
_ports = itertools.count(15000)
_batches = itertools.count(1)


@dataclass(eq=False)
class Shared:
    """What others use of an engine. It closes when the last reference to the engine goes, as the library's do. The
    lock is held while bytes are copied.
    """

    memory: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def gives(self, address: int, nbytes: int) -> bool:
        places = self.memory.items()
        return not self.closed and any(at <= address and address + nbytes <= at + n for at, n in places)


engines: dict[int, Shared] = {}
"""By port."""


class FakeEngine:
    def __init__(self) -> None:
        self.port = next(_ports)
        self.shared = engines[self.port] = Shared()
        self.under_way: dict[int, tuple[str, int, int, int]] = {}

    def __del__(self) -> None:
        with self.shared.lock:
            self.shared.closed = True

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str) -> int:
        assert (metadata, protocol) == ("P2PHANDSHAKE", "tcp")
        return 0

    def get_rpc_port(self) -> int:
        return self.port

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.shared.memory |= dict(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        with self.shared.lock:
            for one in addresses:
                del self.shared.memory[one]
        return 0

    def batch_transfer_async_read(self, peer: str, here: list[int], there: list[int], lengths: list[int]) -> int:
        assert len(here) == len(there) == len(lengths) == 1, "of a larger batch nothing tells when it has ended"
        if _engine(peer).closed:
            return 0
        batch = next(_batches)
        self.under_way[batch] = peer, here[0], there[0], lengths[0]
        assert sum(one[0] == peer for one in self.under_way.values()) <= MOST
        return batch

    def transfer_check_status(self, batch: int) -> int:
        peer, here, there, nbytes = self.under_way.pop(batch)  # fails where it is asked for again
        engine = _engine(peer)
        with engine.lock:
            if not engine.gives(there, nbytes):
                return -1
            ctypes.memmove(here, there, nbytes)
            return 1


def _engine(peer: str) -> Shared:
    return engines[int(peer.rpartition(":")[2])]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this imported as Mooncake until a test's end."""
    module = ModuleType("mooncake.engine")
    vars(module)["TransferEngine"] = FakeEngine
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
