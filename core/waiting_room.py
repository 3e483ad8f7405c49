"""Who connects while the model loads is told so: 503, in the shape of every other error."""

from __future__ import annotations

import asyncio
import socket
import ssl
from types import TracebackType

import msgspec

from pegboard.core.toolkit.http import error_body

PATIENCE = 5.0
"""Seconds that a connection may take, from the first byte of its request to the end of the answer."""
BACKLOG = 2048

_BODY = msgspec.json.encode(
    error_body("the model is still loading, try again in a moment", status=503, code="not_ready")
)
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 5\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class WaitingRoom:
    """Answers a listening socket's connections inside ``async with``; afterwards they wait for whoever accepts next."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._listener = listener
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> None:
        # A second descriptor, because closing the server closes its socket; what listens is one.
        patience = PATIENCE if self._tls is not None else None
        self._server = await asyncio.start_server(
            _turn_away, sock=self._listener.dup(), backlog=BACKLOG, ssl=self._tls, ssl_handshake_timeout=patience
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()


async def _turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_ANSWER)
            if writer.can_write_eof():
                writer.write_eof()
            # To the end of the body: closing on unread bytes resets the connection, and the answer may be lost.
            while await reader.read(65536):
                pass
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()
