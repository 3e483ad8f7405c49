"""The HTTP protocol with bounds: on what comes before a body, whose parser collects headers without one, on the
time that a request takes to arrive and an answer waits to be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.http_guard.connections import SLOW_GRACE, SPARE, SPARE_SECONDS, no_connection_left
from pegboard.toolkit.http.bodies import ANY_SIZE, MOST_BODY
from pegboard.toolkit.http.errors import answer_error
from pegboard.toolkit.http.protocol import StreamingProtocol
from pegboard.toolkit.system.log_lines import LimitedLog, quoted

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from pegboard.plugins.http_guard.connections import Place

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 128
MAX_OVERHEAD = 16
"""Bytes on the wire per byte of a body, beside those of the head: chunks of a single byte take six, and trailers, which
the parser collects without a bound as well, must fit in."""

LEAST_FILE_RATE = 16 * 1024
"""Bytes per second in which a file must arrive, over each `server.request_timeout`."""

_malformed = LimitedLog(logger, most=10, seconds=60.0)


class BoundedHttpProtocol(StreamingProtocol):
    """Refuses requests whose line and headers are too large (431) or that take too long to arrive (408), and ends
    connections whose client does not read its answer. What comes to a spare place is marked so for the application.
    A file (a route that declares STREAMED) has as long as it takes, while it arrives at LEAST_FILE_RATE.
    """

    _in_head = True
    _head_bytes = 0
    _arrived = 0
    _body_bytes = 0
    _seen_bytes = 0
    """Bytes of the body that had arrived when its time was last extended."""
    _begun = False
    """Whether a request has begun and not ended yet."""
    _deadline: asyncio.TimerHandle | None = None
    _refusal: InvalidRequest | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _read = 0
    """Bytes of answers that had left for the client when it was last looked at."""
    _counted: _CountingTransport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        place: Place,
        request_timeout: float,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._place = place
        self._request_timeout = request_timeout

    # ---- connections ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._counted = _CountingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._counted))
        self._place.end = self._make_room
        if self._place.spare:
            self.loop.call_later(SPARE_SECONDS, transport.close)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._place.leave()
        super().connection_lost(exc)

    def _make_room(self, at_once: bool) -> bool:
        """End because another connection needs the place. False, with nothing done, where the client has yet to read an
        answer, unless it is to be at once.
        """
        if self._begun and not self._in_head and not self._is_quiet():
            if self._place.spare:
                self._refuse(no_connection_left())
                return True
            self._too_late(SLOW_GRACE, ", which is all that one gets while connections are short")
        elif at_once or not self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            return False
        return True

    # ---- time -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self._request_timeout, self._too_slow)

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
            if self._file_arrives():
                self._seen_bytes = self._body_bytes
                self._watch()
            else:
                self._too_late(self._request_timeout, self._rate_needed())
        elif self.flow.read_paused or answering:
            # It is us who do not read; or an answer is under way that the next request must not cut off.
            self._watch()
        elif self._begun:
            self._too_late(self._request_timeout)
        else:
            self.transport.close()

    def _takes_file(self) -> bool:
        """Return whether what arrives is a file that the application reads: one that it has answered is not."""
        if self._is_quiet():
            return False
        extensions: Mapping[str, object] = self.scope.get("extensions", {})
        return extensions.get(MOST_BODY) == ANY_SIZE

    def _file_arrives(self) -> bool:
        """Return whether enough of a file has come since its time was last extended."""
        return self._takes_file() and self._body_bytes - self._seen_bytes >= LEAST_FILE_RATE * self._request_timeout

    def _rate_needed(self) -> str:
        rate = f"{LEAST_FILE_RATE // 1024} KiB per second"
        return f" (a file may take longer, if {rate} arrive)" if self._takes_file() else ""

    def _too_late(self, seconds: float, why: str = "") -> None:
        message = f"the request did not arrive within {seconds:g} s{why}"
        self._refuse(InvalidRequest(message, status=408, code="too_slow"))

    # Where nothing of an answer is read for as long as a request may take to arrive, its client has gone.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        self._watch_reader()
        super().timeout_keep_alive_handler()

    def _watch_reader(self) -> None:
        if self._unread_timer is None:
            self._read = self._counted.left
            self._unread_timer = self.loop.call_later(self._request_timeout, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._unread_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if self._counted.left <= self._read:
            self.transport.abort()
        else:
            self._watch_reader()

    # ---- what the parser finds ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._arrived += len(data)
        self._unset_keepalive_if_required()
        try:
            self.feed(data)
        except httptools.HttpParserError as error:
            self._not_http(error)
        if self._begun:
            # A header that does not end is not a header for the parser yet.
            if self._arrived > 2 * MAX_HEAD_BYTES + MAX_OVERHEAD * self._body_bytes:
                self._refuse(_too_large("the request's headers do not end"))
        elif self._deadline is None and not self._place.spare and self._is_quiet():
            # Empty lines between two requests, which have stopped the timer that uvicorn has for such connections.
            self._watch()

    def on_message_begin(self) -> None:
        self._in_head = self._begun = True
        self._head_bytes = self._arrived = self._body_bytes = self._seen_bytes = 0
        if self._deadline is None and not self._place.spare:
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
            self._give_up(_too_large(f"the request has more than {MAX_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.to_be_parsed_again():
            return
        self._check_host()
        self._in_head = False
        if self._place.spare:
            self.scope["state"][SPARE] = True
        if self._is_quiet():
            self._place.is_slow()
        super().on_headers_complete()
        if self._place.spare:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if self.to_be_parsed_again():
            return
        self._begun = False
        self._rest()
        if not self._is_quiet():
            self._place.is_busy()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        pipelined = bool(self.pipeline)
        if not pipelined:
            self._place.is_idle()
        super().on_response_complete()
        if pipelined and not self.pipeline and self._begun and not self._in_head:
            # The next one begins only now, and its body has not arrived.
            self._place.is_slow()

    def _check_host(self) -> None:
        """One Host, and with HTTP/1.0 none at all is good enough (RFC 9112, 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            message = f"a request has one Host header, and this one {hosts or 'none'}"
            self._give_up(InvalidRequest(message, code="bad_host"))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._give_up(_too_large(f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes"))

    def _give_up(self, refusal: InvalidRequest) -> None:
        self._refusal = refusal
        # The parser gives up, and raises.
        raise ValueError(refusal.message)

    def _not_http(self, error: httptools.HttpParserError) -> None:
        refusal = self._refusal or InvalidRequest("Invalid HTTP request received.", code="malformed_request")
        where = f"{self.client[0]}:{self.client[1]}" if self.client else "unknown"
        why = self._refusal.message if self._refusal is not None else str(error)
        _malformed.log(logging.WARNING, "a request from %s was refused unread: %s", where, quoted(why))
        self._refuse(refusal)

    # ---- answers of its own ---------------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        """Return whether no answer is under way."""
        cycle: object = self.cycle
        return not isinstance(cycle, RequestResponseCycle) or cycle.response_complete

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer, unless an answer has begun, and close."""
        if self._is_quiet() or not self.cycle.response_started:
            response = answer_error(error)
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()


class _CountingTransport:
    """A transport that knows how much was written to it. Where its buffer is not smaller than before, only this tells a
    client that reads slowly from one that reads nothing.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self.written = 0

    @property
    def left(self) -> int:
        """Bytes that are no longer in the buffer."""
        return self.written - self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._write(data)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        setattr(self, name, found)
        return found


def _too_large(message: str) -> InvalidRequest:
    return InvalidRequest(message, status=431, code="headers_too_large")
