"""A port that a source listens at, for peers that show its token."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.protocol import BadFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.plugins.kv_handoff.api.leases import Counts

logger = logging.getLogger(__name__)

TOKEN = 32
"""Bytes of a token."""
MOST_STRANGERS = 64
"""Connections that have not said hello yet."""
MOST_CONNECTIONS = 512
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds and probes until the connection with a machine that is gone without a word ends: two minutes."""


def unreached(host: str) -> str:
    """Return what to do about a source of KV at this address that cannot be reached; "" where it is on this machine,
    and has ended.
    """
    with contextlib.suppress(ValueError):  # a host by its name
        if ipaddress.ip_address(host).is_loopback:
            return ""
    text = (
        "set kv_transfer.listen_host on that server to an address that this one can reach (by default it is 127.0.0.1)"
    )
    return f"; {text}, and let a firewall pass kv_transfer.listen_port"


class Listener:
    """Listens once it is asked to, and has a thread for each connection.

    A peer says hello with `magic` and the token, within `seconds`, and is welcomed with `magic`. Then `serve` has the
    connection; it may raise OSError, and BadFrame where the peer has sent what it must not.
    """

    def __init__(self, magic: bytes, serve: Callable[[socket.socket], None], counts: Counts, seconds: float) -> None:
        self.token = secrets.token_bytes(TOKEN)
        self.closed = False
        self._magic = magic
        self._hello = magic + self.token
        self._serve_peer = serve
        self._counts = counts
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None

    def listen(self, host: str, port: int) -> int:
        """Listen, from the first call on; return the port. Raises OSError, with what to do."""
        if self._listener is None:
            listener = self._listener = _listen(host, port)
            self._accepting = threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True)
            self._accepting.start()
        found: int = self._listener.getsockname()[1]
        return found

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self.closed = True
            connections = dict(self._connections)
        for one in (self._listener, *connections):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in (self._accepting, *connections.values()):
            if thread is not None:
                thread.join()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self.closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self.closed:  # too many files are open, which may pass
                    time.sleep(0.05)
                continue
            if not self._take_in(connection):
                self._counts.add("refused_connections_total")
                connection.close()

    def _take_in(self, connection: socket.socket) -> bool:
        """Start a thread for a connection; the first of too many that have not said hello makes way. False where there
        are too many all the same.
        """
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-send", daemon=True)
        with self._lock:
            if self.closed or len(self._connections) >= MOST_CONNECTIONS:
                return False
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                return False
            self._connections[connection] = thread
            self._strangers[connection] = None
            if len(self._strangers) > MOST_STRANGERS:
                first = next(iter(self._strangers))
                del self._strangers[first]
                with contextlib.suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._is_welcome(connection):
                    self._serve_peer(connection)
                else:
                    self._counts.add("refused_connections_total")
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        except BadFrame as error:
            logger.warning("a peer's connection is closed, since it has sent what it must not: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _is_welcome(self, connection: socket.socket) -> bool:
        """Return whether the token is right. Nothing else is looked at before."""
        hello = bytearray(len(self._hello))
        try:
            receive(connection, memoryview(hello), self._seconds)
        except OSError:
            return False
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
        if not hmac.compare_digest(hello, self._hello):
            return False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._magic)
        return True


def receive(connection: socket.socket, into: memoryview, within: float | None, idle: float | None = None) -> None:
    """Fill a buffer, within so many seconds or with at most `idle` ones without a byte. Raises OSError."""
    end = None if within is None else time.monotonic() + within
    while into:
        connection.settimeout(idle if end is None else max(0.001, end - time.monotonic()))
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("closed by the peer")
        into = into[count:]


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What it accepts inherits these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # systems differ in which they have
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(MOST_STRANGERS)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"kv_transfer.listen_host {host!r}, listen_port {port}: {error.strerror}; choose another one"
        ) from error
    return listener
