"""Fetcher: media from the addresses that requests name, without letting a request look inside.

A name is resolved once. Every address that it has must be public, and the connection goes to one of those that were
looked at: a name that means something else a moment later leads nowhere. Redirects go through all of this again. Bytes
and seconds are bounded, whatever the other side does. What went wrong is told in one sentence for everything that
would tell something of the network in here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend.addresses import (
    Address,
    Resolve,
    host_name,
    is_allowed_name,
    is_public,
    resolve,
)

logger = logging.getLogger(__name__)

CODE = "media_not_fetched"
PORTS = {"http": 80, "https": 443}
REDIRECTS = 3
MAX_URL = 8192
MAX_HEAD = 64 * 1024
"""Bytes of an answer's status and headers."""
RESOLVERS = 4
"""Most names that are looked up at one time; the system gives them up when it pleases."""
_PIECE = 64 * 1024
_PIECES, _SMALL_PIECE = 4096, 256
"""Pieces that an answer may consist of, whatever its size, and bytes that each one more must have on average."""
_TICK = 0.25
"""Seconds after which a fetch that waits looks whether it is still wanted."""
_UNSAFE = frozenset(map(chr, [*range(0x21), 0x7F, ord("\\")]))
_SAFE = "/:@!$&'()*+,;=~%-._?"

T = TypeVar("T")

Sink = Callable[[bytes], object]
"""Takes bytes of a body as they come, and none now and then while there are none. What it raises ends the fetch."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What may be fetched: at most `max_bytes` within `seconds`, at these ports, of these servers (any where empty)."""

    max_bytes: int = 50 * 2**20
    seconds: float = 10.0
    ports: tuple[int, ...] = (80, 443)
    domains: tuple[str, ...] = ()


class _Hidden(Exception):
    """A reason that no client learns. Its text is for the log, at the level debug."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What is to be fetched from where, checked."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @property
    def shown_host(self) -> str:
        """Return the host as a Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class Fetcher:
    """Fetches one address per call, in the caller's thread. Thread-safe.

    `resolve` finds the addresses of a name, `allowed` says which of them may be connected to, `tls` is for https. All
    three are for tests; the environment's proxies are never asked.
    """

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolve: Resolve = resolve,
        allowed: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._allowed = allowed
        self._tls = tls
        self._resolvers = ThreadPoolExecutor(RESOLVERS, "media-resolve")

    def check(self, url: str) -> None:
        """Raise InvalidRequest for an address that is refused without looking any further."""
        self._target(url)

    def fetch(self, url: str, sink: Sink) -> None:
        """Give the body to the sink, piece by piece. Raises InvalidRequest (400), and what the sink raises."""
        deadline = time.monotonic() + self._limits.seconds
        target = self._target(url)
        try:
            for _ in range(REDIRECTS + 1):
                where = self._get(target, deadline, sink)
                if where is None:
                    return
                target = self._redirected(target, where)
        except (_Hidden, OSError, h11.RemoteProtocolError) as error:
            logger.debug("media cannot be fetched: %s: %s", type(error).__name__, error)
            raise InvalidRequest("this address cannot be fetched", code=CODE) from None
        raise InvalidRequest(f"this address cannot be fetched: more than {REDIRECTS} redirects", code=CODE)

    def close(self) -> None:
        """Forget names that are being looked up."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    # ---- where to -------------------------------------------------------------------------------------------------

    def _target(self, url: str) -> _Target:
        """Return where an address leads. Raises InvalidRequest with what is wrong with it, which its client knows."""
        try:
            parts = _split(url)
            port = parts.port
        except ValueError as error:
            raise _refused(f"this address is malformed: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise _refused("an address with a user name or password is not fetched")
        host = host_name(parts.hostname or "")
        if host is None:
            raise _refused("this address has no host, or one that is not written as usual")
        port = PORTS[parts.scheme] if port is None else port
        if port not in self._limits.ports:
            raise _refused(f"port {port} is not one of those that media are fetched from (media.fetch_ports)")
        if not is_allowed_name(host, self._limits.domains):
            raise _refused("this server is not one of those that media are fetched from (media.allowed_domains)")
        path = parts.path or "/"
        asked = f"{path}?{parts.query}" if parts.query else path
        return _Target(url, parts.scheme, host, port, quote(asked, safe=_SAFE))

    def _redirected(self, target: _Target, where: str) -> _Target:
        """Return where a redirect leads. The server chose it, so that what is wrong with it is told to no client."""
        try:
            return self._target(urljoin(target.url, where))
        except (InvalidRequest, ValueError) as error:
            raise _Hidden(f"a redirect leads to {where[:200]!r}: {error}") from None

    def _addresses(self, target: _Target, deadline: float) -> list[Address]:
        """Return the addresses of a name, all of which may be connected to."""
        looking = self._resolvers.submit(self._resolve, target.host, target.port)
        try:
            found = looking.result(max(0.0, deadline - time.monotonic()))
            addresses: list[Address] = [ipaddress.ip_address(one) for one in found]
        except ValueError as error:
            raise _Hidden(str(error)) from None
        finally:
            looking.cancel()
        if not addresses or not all(map(self._allowed, addresses)):
            raise _Hidden(f"{target.host} has addresses that are not allowed")
        return addresses

    # ---- how ------------------------------------------------------------------------------------------------------

    def _get(self, target: _Target, deadline: float, sink: Sink) -> str | None:
        """Give the body to the sink, or return where a redirect leads."""
        line = self._connect(target, self._addresses(target, deadline), deadline, sink)
        with contextlib.closing(line):
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
            headers = [("Host", target.shown_host), ("User-Agent", "pegboard"), ("Accept", "*/*")]
            headers += [("Accept-Encoding", "identity"), ("Connection", "close")]
            request = h11.Request(method="GET", target=target.path, headers=headers)
            line.send((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
            events = _events(connection, line, 2 * self._limits.max_bytes + MAX_HEAD)
            head = next(event for event in events if isinstance(event, h11.Response))
            named = {bytes(name).lower(): bytes(value) for name, value in head.headers}
            if head.status_code in (301, 302, 303, 307, 308) and b"location" in named:
                return named[b"location"].decode("ascii", "replace")
            if head.status_code != 200:
                text = f"this address cannot be fetched: its server answered with {head.status_code // 100}xx"
                raise InvalidRequest(text, code=CODE)
            self._take(events, named, sink)
        return None

    def _take(self, events: Iterator[h11.Event], named: dict[bytes, bytes], sink: Sink) -> None:
        """Give a body to the sink."""
        left = self._limits.max_bytes
        # Of digits only, which h11 has seen to.
        if int(named.get(b"content-length", b"0")) > left:
            raise too_large(self._limits.max_bytes)
        for event in events:
            if isinstance(event, h11.Data):
                left -= len(event.data)
                if left < 0:
                    raise too_large(self._limits.max_bytes)
                sink(bytes(event.data))

    def _connect(self, target: _Target, addresses: Sequence[Address], deadline: float, sink: Sink) -> _Line:
        """Return a line to the first address that answers."""
        failed: Exception = _Hidden("no address")
        for number, address in enumerate(addresses):
            left = deadline - time.monotonic()
            line = _Line(address, functools.partial(sink, b""))
            try:
                # The last one may take all the time that is left.
                line.connect(address, target.port, time.monotonic() + left / (len(addresses) - number))
                line.deadline = deadline
                if target.scheme == "https":
                    line.encrypt(self._context(), target.host)
            except (OSError, ValueError) as error:
                line.close()
                failed = _Hidden(f"{address}: {error}")
            except BaseException:
                line.close()
                raise
            else:
                return line
        raise failed

    def _context(self) -> ssl.SSLContext:
        """Return what https needs; reading the system's certificates takes a while."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Line:
    """A connection to one address on which nothing waits beyond `deadline`. `wanted` is called now and then meanwhile,
    and may raise.
    """

    def __init__(self, address: Address, wanted: Callable[[], object]) -> None:
        self._socket = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._wanted = wanted
        self.deadline = 0.0

    def connect(self, address: Address, port: int, deadline: float) -> None:
        """Connect until then. Raises OSError."""
        self.deadline = deadline
        state = self._socket.connect_ex((str(address), port))
        if state == errno.EINPROGRESS:
            self._wait(select.POLLOUT)
            state = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if state:
            raise OSError(state, os.strerror(state))

    def encrypt(self, context: ssl.SSLContext, host: str) -> None:
        """Speak TLS from now on. Raises OSError where the other side is not `host`."""
        wrapped = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = wrapped
        self._through(wrapped.do_handshake, select.POLLIN)

    def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError."""
        while data:
            data = data[self._through(functools.partial(self._socket.send, data), select.POLLOUT) :]

    def receive(self) -> bytes:
        """Return what comes next, b"" at the end. Raises OSError."""
        return self._through(functools.partial(self._socket.recv, _PIECE), select.POLLIN)

    def close(self) -> None:
        self._socket.close()

    def _through(self, call: Callable[[], T], event: int) -> T:
        """Call it again whenever the socket is ready, until it works."""
        while True:
            # A side that always has something ready must not outlive the deadline either.
            self._look()
            try:
                return call()
            except BlockingIOError:
                self._wait(event)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), event)
        while not poll.poll(_TICK * 1000):
            self._look()

    def _look(self) -> None:
        self._wanted()
        if time.monotonic() > self.deadline:
            raise TimeoutError("it takes too long")


def _events(connection: h11.Connection, line: _Line, most: int) -> Iterator[h11.Event]:
    """Yield what an answer consists of, up to its end. Raises _Hidden where it takes more than `most` bytes, or comes
    in so many pieces that taking them apart is all that this process would do.
    """
    size = pieces = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = line.receive()
            size += len(data)
            if size > most:
                raise _Hidden("more bytes than any body of the allowed size needs")
            connection.receive_data(data)
            continue
        if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
            raise _Hidden("the connection ends before the answer")
        yield event
        pieces += 1
        if pieces > _PIECES + size // _SMALL_PIECE:
            raise _Hidden("the answer comes in too many pieces")
        if isinstance(event, h11.EndOfMessage):
            return


def _split(url: str) -> SplitResult:
    """Return the parts of an address. Raises ValueError."""
    if len(url) > MAX_URL:
        raise ValueError(f"it has more than {MAX_URL} characters")
    if not _UNSAFE.isdisjoint(url):
        raise ValueError("it has blanks, control characters or backslashes")
    parts = urlsplit(url)
    if parts.scheme not in PORTS:
        raise ValueError("it must begin with http: or https:")
    return parts


def too_large(most: int) -> InvalidRequest:
    """Return the refusal of an item of more bytes than one may have."""
    text = f"this has more than the {most} bytes that one item may have (media.max_item_bytes)"
    return InvalidRequest(text, code="media_too_large")


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, code=CODE)
