"""Answers for clients that connect while the model loads: 503, in the shape of every other error. Probes that ask
whether the process is alive get 200: a supervisor that restarts what is not would never see the model loaded.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from types import TracebackType

import msgspec

from pegboard.core.server.http.connections import Acceptor, Place, Places
from pegboard.toolkit.http.errors import error_body

PATIENCE = 5.0
"""Seconds that a connection may take, from the first byte of its request to the end of the answer."""
BACKLOG = 2048
ALIVE = re.compile(rb"(GET|HEAD) /(health|ping)(\?\S*)? HTTP/1\.[01]\r\n")
"""Requests that ask for no more than that."""

_BODY = msgspec.json.encode(
    error_body("the model is still loading, try again in a moment", status=503, code="not_ready")
)
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 5\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


_ALIVE_ANSWER = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class WaitingRoom:
    """Answers a listening socket's connections inside ``async with``; afterwards they wait for the next server."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None, max_connections: int = 1024) -> None:
        self._listener = listener
        self._tls = tls
        self._places = Places(max_connections)
        self._acceptor: Acceptor | None = None

    async def __aenter__(self) -> None:
        self._acceptor = Acceptor(self._listener, self._places, _protocol, tls=self._tls, handshake_seconds=PATIENCE)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._acceptor is not None
        self._acceptor.close()


def _protocol(place: Place) -> asyncio.StreamReaderProtocol:
    async def turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def end(at_once: bool) -> bool:
            writer.transport.abort()
            return True

        place.end = end
        try:
            await _turn_away(reader, writer)
        finally:
            place.leave()

    return asyncio.StreamReaderProtocol(asyncio.StreamReader(), turn_away)


async def _turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
            answer = _ALIVE_ANSWER if ALIVE.match(head) else _ANSWER
            writer.write(answer.removesuffix(_BODY) if head.startswith(b"HEAD ") else answer)
            if writer.can_write_eof():
                writer.write_eof()
            # To the end of the body: closing on unread bytes resets the connection, and the answer may be lost.
            while await reader.read(65536):
                pass
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()
