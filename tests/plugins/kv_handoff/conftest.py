"""Servers of tests, each with staging in small blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from pegboard.plugins.kv_handoff.api import staging
from pegboard.plugins.kv_handoff.api.staging import StagingOptions
from tests.plugins.kv_handoff.peer import Peer
from tests.plugins.kv_handoff.toy import BLOCK, Server

Make = Callable[..., Server]
Dial = Callable[..., Peer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes a server, with so many blocks."""
    monkeypatch.setattr(staging, "BLOCK", BLOCK)
    made: list[Server] = []

    def one(blocks: int = 4) -> Server:
        made.append(Server(StagingOptions(staging=blocks * BLOCK), seed=len(made)))
        return made[-1]

    yield one
    for server in made:
        server.engine.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Return what connects to a source, with the right token unless `hello` is something else."""
    made: list[Peer] = []

    def one(server: Server, hello: bytes | None = None) -> Peer:
        made.append(Peer(server, hello))
        return made[-1] if hello is not None else made[-1].welcomed()

    yield one
    for peer in made:
        peer.socket.close()
