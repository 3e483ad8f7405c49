"""uvicorn's HTTP protocol with bounds: on what comes before a body, whose parser collects headers without one, on the
time that a request takes to arrive, and on connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.answer_stream import BODY_WRITER
from pegboard.core.toolkit.http import answer_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 128
MAX_OVERHEAD = 16
"""Bytes on the wire per byte of a body, beside those of the head: chunks of a single byte take six, and trailers, which
the parser collects without a bound as well, must fit in."""
REFUSED_PATIENCE = 2.0
"""Seconds that a connection over the limit may take for its request and its answer."""
_SAY_EVERY = 60.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses requests whose line and headers are too large (431) or that take too long to arrive (408), and answers
    connections over `max_connections` with 503. All of these connections are closed.

    Make a class of it with `bounded_protocol`, for one server.
    """

    max_connections: int
    request_timeout: float
    inside = 0
    said_at = float("-inf")

    _admitted = False
    _in_head = True
    _head_bytes = 0
    _arrived = 0
    _body_bytes = 0
    _begun = False
    """Whether a request has begun and not ended yet."""
    _deadline: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    """Cuts off a client that takes nothing of its answer."""
    _refusal: InvalidRequest | None = None

    # ---- connections ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        kind = type(self)
        self._admitted = kind.inside < self.max_connections
        if self._admitted:
            kind.inside += 1
            self._watch()
            return
        if time.monotonic() - kind.said_at > _SAY_EVERY:
            kind.said_at = time.monotonic()
            logger.warning("there are %d connections (server.max_connections): more get 503", self.max_connections)
        self.app = _full
        self.loop.call_later(REFUSED_PATIENCE, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self._unstuck()
        if self._admitted:
            self._admitted = False
            type(self).inside -= 1
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # A client that takes nothing at all would keep what is written for it, and what it was charged, for ever.
        self._stuck = self.loop.call_later(self.request_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._unstuck()
        super().resume_writing()

    def _unstuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    # ---- time -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.request_timeout, self._too_slow)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        answering = not self._is_quiet()
        if self._begun and not self._in_head and not self.flow.read_paused:
            self._too_late()
        elif self.flow.read_paused or answering:
            # It is us who do not read; or an answer is under way that the next request must not cut off.
            self._watch()
        elif self._begun:
            self._too_late()
        else:
            self.transport.close()

    def _too_late(self) -> None:
        message = f"the request did not arrive within {self.request_timeout:g} s"
        self._refuse(InvalidRequest(message, status=408, code="too_slow"))

    # ---- what the parser finds ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._arrived += len(data)
        super().data_received(data)
        if self._begun:
            # A header that does not end is no header for the parser yet.
            if self._arrived > 2 * MAX_HEAD_BYTES + MAX_OVERHEAD * self._body_bytes:
                self._refuse(_too_large("the request's headers do not end"))
        elif self._deadline is None and self._admitted and self._is_quiet():
            # Empty lines between two requests, which have stopped the timer that uvicorn has for such connections.
            self._watch()

    def on_message_begin(self) -> None:
        self._in_head = self._begun = True
        self._head_bytes = self._arrived = self._body_bytes = 0
        if self._deadline is None and self._admitted:
            self._watch()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._give_up(f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {BODY_WRITER: _BodyWriter(self.cycle)}
            self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        self._begun = False
        self._rest()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # The writer knows the cycle, and the cycle its scope: a circle that would wait for the garbage collector.
        cycle: Any = self.cycle
        if cycle is not None and cycle.response_complete:
            cycle.scope.pop("extensions", None)
        super().on_response_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._give_up(f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes")

    def _give_up(self, message: str) -> None:
        self._refusal = _too_large(message)
        # The parser gives up, and uvicorn calls send_400_response.
        raise ValueError(message)

    # ---- answers of its own ---------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest(msg, code="malformed_request"))

    def _is_quiet(self) -> bool:
        """Whether no answer is under way."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer, unless an answer has begun, and close."""
        if self._is_quiet() or not self.cycle.response_started:
            response = answer_error(error)
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()


class _BodyWriter:
    """What `RequestResponseCycle.send` does with a piece of a chunked body, without being awaited for each."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def gone(self) -> bool:
        return bool(self._cycle.disconnected)

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.disconnected:
            return True
        if not cycle.chunked_encoding or cycle.response_complete:
            raise RuntimeError("this response takes no pieces")
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        await self._cycle.flow.drain()


def _too_large(message: str) -> InvalidRequest:
    return InvalidRequest(message, status=431, code="headers_too_large")


def bounded_protocol(max_connections: int, request_timeout: float) -> type[BoundedHttpProtocol]:
    """The protocol of one server, which counts its connections."""
    bounds = {"max_connections": max_connections, "request_timeout": request_timeout}
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), bounds)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """The application for who comes when everything is taken."""
    error = InvalidRequest("the server has no connection left, try again later", status=503, code="busy")
    response = answer_error(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
