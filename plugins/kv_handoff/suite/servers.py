"""What all tests of KV transfers start from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from pegboard.conformance.suite import ContractSuite
from pegboard.plugins.kv_handoff.api.transfer import Ranges, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, Expected, Server

DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE
MIB = 2**20
SMALL = (5000, 3000, 4096)
SETTLE = 0.05
"""Seconds in which what must not happen any more would."""


class Servers:
    """Makes servers, and ends them with the test."""

    def __init__(self, suite: TransferSuite) -> None:
        self._suite = suite
        self._made: list[Server] = []

    def make(self, sizes: Sequence[int] = SMALL, *, lease: bool = True) -> Server:
        """Return a server that lets others read under LEASE."""
        made = Server(sizes, self._suite.build, seed=len(self._made) + 1)
        self._made.append(made)
        if lease:
            made.engine.allow(LEASE)
        return made

    def pair(self, sizes: Sequence[int] = SMALL) -> tuple[Server, Server]:
        """Return a source, and a reader that knows it as "peer"."""
        source, reader = self.make(sizes), self.make(sizes)
        reader.connect(source)
        return source, reader

    def close(self, server: Server) -> None:
        """End one now."""
        self._made.remove(server)
        server.engine.close()
        server.check_guards()

    def end(self) -> None:
        """End all."""
        for server in list(self._made):
            self.close(server)


class TransferSuite(ContractSuite):
    """Makes servers, and reads from one of them into another one. All are in this process, each with an engine."""

    contract = "kv_transfer"

    patience: ClassVar[float] = 30.0
    """Seconds in which a read ends, on a busy machine and with a peer that is gone."""

    @pytest.fixture
    def servers(self) -> Iterator[Servers]:
        """Make servers of a test."""
        servers = Servers(self)
        yield servers
        servers.end()

    def check(self, source: Server, reader: Server, wanted: Ranges, target: Ranges) -> None:
        """Read, and compare everything in the reader's memory."""
        expected = Expected(reader.copy())
        expected.fill(target, source.bytes_at(wanted))
        handle = reader.read(wanted, target)
        assert reader.wait([handle], self.patience) == [DONE], reader.ended[handle].reason
        expected.check(reader)

    def check_fails(self, reader: Server, wanted: Ranges, target: Ranges, what: str, *, lease: int = LEASE) -> str:
        """Read what cannot be read; return the reason that is told."""
        handle = reader.read(wanted, target, lease=lease)
        assert reader.wait([handle], self.patience) == [FAILED], f"a read {what} has not failed"
        assert reader.ended[handle].reason, f"no reason is told for the failure of a read {what}"
        reader.check_guards()
        return reader.ended[handle].reason

    def check_nothing_more(self, source: Server, reader: Server) -> None:
        """Fail where the reader's memory still changes, now that the source's is another one."""
        before = reader.copy()
        source.renew()
        end = time.monotonic() + SETTLE
        while time.monotonic() < end:
            reader.poll()
            source.poll()
            time.sleep(0.001)
        Expected(before).check(reader)
