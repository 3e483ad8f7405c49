"""uvicorn's HTTP protocol with bounds: on what comes before a body, whose parser collects headers without one, and on
connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pegboard.core.toolkit.http import error_body, json_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; what arrives in one read with their end is not counted."""
REFUSED_PATIENCE = 2.0
"""Seconds that a connection over the limit may take for its request and its answer."""
_SAY_EVERY = 60.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers do not end, and answers those over `max_connections` with 503.

    Make a class of it with `bounded_protocol`, for one server.
    """

    max_connections: int
    inside = 0
    said_at = float("-inf")

    _admitted = False
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        kind = type(self)
        self._admitted = kind.inside < self.max_connections
        if self._admitted:
            kind.inside += 1
            return
        if time.monotonic() - kind.said_at > _SAY_EVERY:
            kind.said_at = time.monotonic()
            logger.warning("there are %d connections (server.max_connections): more get 503", self.max_connections)
        self.app = _full
        self.loop.call_later(REFUSED_PATIENCE, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._admitted:
            self._admitted = False
            type(self).inside -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("Request headers are too large.")
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()


def bounded_protocol(max_connections: int) -> type[BoundedHttpProtocol]:
    """The protocol of one server, which counts its connections."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"max_connections": max_connections})


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """The application for who comes when everything is taken."""
    body: dict[str, Any] = error_body("the server has no connection left, try again later", status=503, code="busy")
    response = json_response(body, 503)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
