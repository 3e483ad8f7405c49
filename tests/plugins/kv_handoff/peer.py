"""A reader that a test speaks for."""

from __future__ import annotations

import contextlib
import socket

from pegboard.plugins.kv_handoff.api.protocol import ANSWER, MAGIC, NUMBER, ORDER, RETURN, Status, pack_request
from pegboard.plugins.kv_handoff.api.transfer import Ranges
from pegboard.plugins.kv_handoff.suite.rig import LEASE
from tests.plugins.kv_handoff.toy import BLOCK, PATIENCE, SLOT, Server, slots

SOME = slots(1, BLOCK // SLOT)
"""As much as a block holds."""


class Peer:
    """Its connection to a source's port of orders."""

    def __init__(self, server: Server, hello: bytes | None = None) -> None:
        assert server.engine.staging is not None
        place = server.engine.staging.place()
        self.socket = socket.create_connection(("127.0.0.1", place.port), timeout=PATIENCE)
        self.socket.sendall(MAGIC + place.token if hello is None else hello)

    def welcomed(self) -> Peer:
        assert self.socket.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
        return self

    def order(self, number: int, some: Ranges = SOME, lease: int = LEASE) -> None:
        self.socket.sendall(ORDER + pack_request(number, lease, some))

    def give_back(self, number: int) -> None:
        self.socket.sendall(RETURN + NUMBER.pack(number))

    def answer(self) -> tuple[int, Status, int]:
        found = b""
        while len(found) < ANSWER.size:
            more = self.socket.recv(ANSWER.size - len(found))
            assert more, "closed"
            found += more
        number, status, block = ANSWER.unpack(found)
        return number, Status(status), block

    def closed(self) -> bool:
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(4096):
                pass
        return True

    def quiet(self) -> bool:
        """Return whether no answer comes for a while."""
        self.socket.settimeout(0.1)
        try:
            return not self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(PATIENCE)
