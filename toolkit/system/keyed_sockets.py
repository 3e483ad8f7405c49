"""Connections between machines whose two ends share a key: who does not show that it knows the key is cut off.

    listener                          connecting side
    a nonce                 ->
                            <-        a nonce, and its signature of both
    its signature of both   ->

A signature is HMAC-SHA-256 with the key, over the name of the side that signs and both nonces, so what was recorded
before is of no use. All of it has a fixed length, and nothing else is read of a connection before its signature is
right. What follows is neither signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from pegboard.core.interfaces.errors import PegboardError

logger = logging.getLogger(__name__)

KEY = 32
"""Bytes of a key, of a nonce and of a signature."""
PROOF = 2 * KEY
STRANGER_SECONDS = 10.0
"""How long a connection may take to show that it knows a key."""
MOST_STRANGERS = 64
"""Connections that may be about to: the oldest makes way for another one."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and probes until the connection with a machine that is gone without a word ends: 25 seconds."""


def new_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(KEY)


def listen(host: str) -> socket.socket:
    """Listen at a free port of this address. Raises PegboardError where the address is not this machine's."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PegboardError(f"this process cannot listen at {host!r}: {error}") from error


def connect(address: tuple[str, int], key: bytes, seconds: float = STRANGER_SECONDS) -> socket.socket:
    """Connect to a `KeyedListener`, which expects this key. Raises PegboardError where it is not there, or does not
    know the key.
    """
    host, port = address
    try:
        connection = socket.create_connection(address, seconds)
    except OSError as error:
        raise PegboardError(f"{host} does not answer at port {port}: {error}") from error
    try:
        theirs, ours = _receive(connection), secrets.token_bytes(KEY)
        connection.sendall(ours + _signature(key, b"connecting", theirs, ours))
        right = hmac.compare_digest(_receive(connection), _signature(key, b"listening", theirs, ours))
    except OSError as error:
        connection.close()
        raise PegboardError(f"{host}, port {port}, has ended the connection before it was accepted: {error}") from error
    if not right:
        connection.close()
        raise PegboardError(f"what listens at {host}, port {port}, does not know the key")
    return _accepted(connection)


class KeyedListener:
    """Listens at a free port of an address, by a thread of its own, for those that know a key."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._expected: dict[bytes, Future[socket.socket]] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="keyed-listener", daemon=True)
        self._thread.start()

    def expect(self, key: bytes) -> Future[socket.socket]:
        """Return what gets the one connection that shows this key; it is its user's to close. One that is cancelled is
        not expected any more.
        """
        coming: Future[socket.socket] = Future()
        self._expected[key] = coming
        return coming

    def close(self) -> None:
        """Listen no more. Connections that were accepted stay open."""
        if not self._closing:
            self._closing = True
            os.write(self._wake_write, b"x")
            self._thread.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(1.0 if self._strangers else None):
                    if key.fileobj is self._listener:
                        self._take_in(selector)
                    elif isinstance(key.data, _Stranger):
                        self._hear(selector, key.data)
                for stranger in [one for one in self._strangers.values() if one.late]:
                    self._cut_off(selector, stranger)
            for stranger in [*self._strangers.values()]:
                self._cut_off(selector, stranger)

    def _take_in(self, selector: selectors.BaseSelector) -> None:
        """Accept a connection, and send it a nonce."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many files are open, which may pass
            time.sleep(0.05)
            return
        stranger = self._strangers[connection] = _Stranger(connection)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, stranger)
        try:
            connection.send(stranger.nonce)  # fits into its empty buffer
        except OSError:
            self._cut_off(selector, stranger)
        if len(self._strangers) > MOST_STRANGERS:
            self._cut_off(selector, next(iter(self._strangers.values())))

    def _hear(self, selector: selectors.BaseSelector, stranger: _Stranger) -> None:
        connection, proof = stranger.connection, stranger.proof
        try:
            data = connection.recv(PROOF - len(proof))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        proof += data
        if data and len(proof) < PROOF:
            return
        coming = self._accept(stranger) if data else None
        if coming is None:
            self._cut_off(selector, stranger)
            return
        selector.unregister(connection)
        del self._strangers[connection]
        coming.set_result(_accepted(connection))

    def _accept(self, stranger: _Stranger) -> Future[socket.socket] | None:
        """Return what waits for this connection, once that was told so; None: nothing waits for it."""
        ours, theirs, given = stranger.nonce, bytes(stranger.proof[:KEY]), bytes(stranger.proof[KEY:])
        for key in [*self._expected]:
            if not hmac.compare_digest(given, _signature(key, b"connecting", ours, theirs)):
                continue
            coming = self._expected.pop(key)
            if not coming.set_running_or_notify_cancel():
                return None
            with contextlib.suppress(OSError):  # gone again: the user of the connection learns of it
                stranger.connection.send(_signature(key, b"listening", ours, theirs))
            return coming
        return None

    def _cut_off(self, selector: selectors.BaseSelector, stranger: _Stranger) -> None:
        if self._strangers.pop(stranger.connection, None) is not None:
            logger.debug("a connection that did not show a key is ended")
            selector.unregister(stranger.connection)
            stranger.connection.close()


@dataclass
class _Stranger:
    """A connection that has not shown a key yet."""

    connection: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(KEY))
    proof: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > STRANGER_SECONDS


def _signature(key: bytes, side: bytes, listening: bytes, connecting: bytes) -> bytes:
    return hmac.digest(key, side + listening + connecting, "sha256")


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < KEY:
        if not (more := connection.recv(KEY - len(data))):
            raise ConnectionResetError("the other end has closed it")
        data += more
    return data


def _accepted(connection: socket.socket) -> socket.socket:
    """Return it, blocking, without delays, and with an end where the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # systems differ in which they have
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
