"""An HTTP/1.1 client that costs as little as possible per token: it shares the cores with the server it measures.

One asyncio protocol per connection, llhttp (httptools) for the framing, no coroutine and no queue between the socket
and the reader of the answer: an event's bytes are looked at where they arrive, with the time at which they did. That is
about 15 us of processor time per event, where aiohttp takes 28 and httpx 100 (docs/bench.md).
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Protocol

import httptools

from pegboard.core.interfaces.errors import PegboardError

CONNECT_SECONDS = 10.0


class RequestFailed(Exception):
    """A request that got no proper answer."""


class Unreachable(RequestFailed):
    """There is no connection to be had."""


class _Stale(Exception):
    """The server closed a connection that had been idle, just as it was used again."""


class Reader(Protocol):
    """Takes one answer as it arrives."""

    def head(self, status: int, headers: dict[str, str]) -> None: ...

    def body(self, data: bytes, now: float) -> None:
        """`now` is time.perf_counter() when these bytes were read."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `base` is the part of the path before the API's own, "" mostly."""

    host: str
    port: int
    tls: bool = False
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """From ``http://127.0.0.1:30000``, with or without ``/v1`` after it. Raises PegboardError."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise PegboardError(f"--url: {url!r} is not an address such as http://127.0.0.1:30000")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.used = False
        """Whether it has answered a request before."""
        self.touched = 0.0
        """When something last happened: a request was sent, or bytes arrived."""
        self._transport: Any = None
        self._parser: Any = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._begun = False
        self._framed = False
        self._now = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, reader: Reader) -> None:
        """Send a request; `reader` gets the answer. Raises RequestFailed, or _Stale where it may be sent again."""
        self._parser = httptools.HttpResponseParser(self)
        self._reader = reader
        self._headers = {}
        self._begun = self._framed = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        self.touched = time.perf_counter()
        try:
            await self._done
        finally:
            self._reader = self._done = None
        self.used = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, message: str) -> None:
        """End the request that is under way with an error."""
        self._end(RequestFailed(message))
        self.close()

    def _end(self, error: Exception | None = None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    # ---- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self.touched = time.perf_counter()
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, RequestFailed):
                self.fail(str(cause))
            else:
                self.fail(f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._begun and not self._framed and exc is None:
            self._end()
        elif not self._begun and self.used:
            self._end(_Stale())
        elif self._begun:
            self._end(RequestFailed("the server broke off in the middle of the answer"))
        else:
            self._end(RequestFailed("the server closed the connection without an answer"))

    # ---- the parser's side ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._begun = True
        self._framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._reader is not None:
            self._reader.head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.body(data, self._now)

    def on_message_complete(self) -> None:
        keep = self._parser.should_keep_alive()
        self._parser = None
        self._end()
        if not keep:
            self.close()


@dataclass(slots=True)
class _Whole:
    """Reads a whole answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> None:
        self.data += data


class HttpClient:
    """Requests to one server, over as many connections as there are requests at once. Idle ones are used again."""

    def __init__(self, address: Address, api_key: str = "", *, timeout: float = 600.0) -> None:
        """`timeout`: after so many seconds without a byte a request has failed."""
        self.address = address
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None
        if api_key and (not api_key.isascii() or not api_key.isprintable()):
            raise PegboardError("the API key has characters that a key cannot have")
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = (
            f"host: {address.authority}\r\nuser-agent: pegboard-bench\r\naccept: */*\r\n"
            f"content-type: application/json\r\n{key}"
        )

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        head = f"{method} {self.address.base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def send(self, request: bytes, reader: Reader) -> None:
        """One request. Raises RequestFailed."""
        while True:
            connection = await self._connection()
            self._busy.add(connection)
            try:
                await connection.ask(request, reader)
            except _Stale:
                continue
            except BaseException:
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if connection.open:
                self._idle.append(connection)
            return

    async def whole(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer. Raises RequestFailed."""
        reader = _Whole()
        await self.send(self.request(method, path, body), reader)
        return reader.status, reader.headers, bytes(reader.data)

    def expire(self) -> None:
        """Fail the requests that have been silent for too long. To be called now and then."""
        limit = time.perf_counter() - self._timeout
        for connection in list(self._busy):
            if connection.touched < limit:
                connection.fail(f"not a byte within {self._timeout:g} s (--timeout)")

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise Unreachable(_unreachable(address, error)) from None
        connection.touched = time.perf_counter()
        return connection


def _unreachable(address: Address, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{address}: the certificate is not trusted: {error.verify_message}; SSL_CERT_FILE names those that are"
    if isinstance(error, ssl.SSLError):
        return f"{address} does not speak HTTPS; is it http://?"
    if isinstance(error, TimeoutError):
        return f"{address} does not take connections within {CONNECT_SECONDS:g} s"
    return f"{address} cannot be reached: {getattr(error, 'strerror', None) or error}"
