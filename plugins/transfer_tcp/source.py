"""The source: threads that send what peers ask for, as long as its lease lasts."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

from pegboard.core.toolkit.transfer.pieces import Memory, Pieces, objection
from pegboard.plugins.transfer_tcp.frames import (
    ANSWER,
    END,
    HELLO,
    MAGIC,
    MAX_RANGES,
    MAX_TOTAL,
    RANGE,
    REQUEST,
    TOKEN,
    BadFrame,
    Status,
    lease_word,
    unpack_ranges,
)
from pegboard.plugins.transfer_tcp.streams import CHUNK, MOST_BUFFERS, Chunks, beyond, new_buffer

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_transfer import Ranges
    from pegboard.plugins.transfer_tcp.options import TcpOptions
    from pegboard.plugins.transfer_tcp.reads import Counts

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Connections that have not said hello yet."""
MOST_CONNECTIONS = 512
_ZEROS = bytes(CHUNK)


class Lease:
    """What a source allows, until it says otherwise."""

    def __init__(self) -> None:
        self.lasts = True


class Source:
    """Listens once it has been described, and has a thread for each connection.

    A lease needs no lock: it is looked at before each chunk is gathered, and once more after the last one. One that
    still lasts then has lasted while all bytes were read. So `revoke` waits for nothing.
    """

    def __init__(self, options: TcpOptions, memory: Memory, counts: Counts) -> None:
        self.token = secrets.token_bytes(TOKEN)
        self._options = options
        self._memory = memory
        self._counts = counts
        self._leases: dict[int, Lease] = {}
        self._hello = MAGIC + self.token
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._closed = False
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None

    def allow(self, lease: int) -> None:
        """Let peers read under this lease. One that stands stays the same: answers under way look at it."""
        self._leases.setdefault(lease_word(lease), Lease())

    def revoke(self, lease: int) -> None:
        """End a lease."""
        ended = self._leases.pop(lease_word(lease), None)
        if ended is not None:
            ended.lasts = False

    def listen(self) -> int:
        """Listen, from the first call on; return the port. Raises OSError, with what to do."""
        if self._listener is None:
            listener = self._listener = _listen(self._options.listen_host, self._options.listen_port)
            self._accepting = threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True)
            self._accepting.start()
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """End all connections and threads. When this returns nothing reads the memory."""
        with self._lock:
            self._closed = True
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

    # ---- connections ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self._closed:  # too many files are open, which may pass
                    time.sleep(0.05)
                continue
            if not self._take_in(connection):
                self._counts.add("refused_connections")
                connection.close()

    def _take_in(self, connection: socket.socket) -> bool:
        """Start a thread for a connection; the first of too many that have not said hello makes way. False where there
        are too many all the same.
        """
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-send", daemon=True)
        with self._lock:
            if self._closed or len(self._connections) >= MOST_CONNECTIONS:
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
                    self._answer_all(connection)
                else:
                    self._counts.add("refused_connections")
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        except BadFrame as error:
            logger.warning("a peer's connection is closed, since it has sent what it must not: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _is_welcome(self, connection: socket.socket) -> bool:
        """Return whether the token is right. Nothing else is looked at before."""
        hello = bytearray(HELLO)
        try:
            _receive(connection, memoryview(hello), self._options.connect_timeout)
        except OSError:
            return False
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
        if not hmac.compare_digest(hello, self._hello):
            return False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(MAGIC)
        return True

    def _answer_all(self, connection: socket.socket) -> None:
        header, buffer = bytearray(REQUEST.size), new_buffer()
        while True:
            connection.settimeout(None)
            if not connection.recv_into(memoryview(header)[:1]):
                return
            _receive(connection, memoryview(header)[1:], self._options.timeout)
            number, lease, total, count = REQUEST.unpack(header)
            if count > MAX_RANGES or total > MAX_TOTAL:
                raise BadFrame(f"{count} pieces with {total} bytes")
            body = bytearray(RANGE * count)
            _receive(connection, memoryview(body), None, self._options.timeout)
            ranges = unpack_ranges(body, count, total)
            self._answer(connection, number, lease, ranges, buffer)

    def _answer(self, connection: socket.socket, number: int, lease: int, ranges: Ranges, buffer: memoryview) -> None:
        """Send what was asked for, or why not."""
        connection.settimeout(self._options.timeout)
        held = self._leases.get(lease)
        if held is None or objection(ranges, self._memory.sizes):
            status = Status.ENDED if held is None else Status.BEYOND
            connection.sendall(ANSWER.pack(number, status, 0))
            return
        pieces = Pieces(ranges)
        connection.sendall(ANSWER.pack(number, Status.OK, pieces.total))
        chunks = Chunks(self._memory, pieces, buffer)
        sent = 0
        while held.lasts and (buffers := chunks.next_filled()):
            while buffers and held.lasts:
                count = connection.sendmsg(buffers[:MOST_BUFFERS])
                buffers = beyond(buffers, count)
                sent += count
        status = Status.OK if held.lasts else Status.ENDED
        self._counts.add("served_bytes", sent)
        while sent < pieces.total:
            sent += connection.send(memoryview(_ZEROS)[: pieces.total - sent])
        connection.sendall(END.pack(number, status))


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST_STRANGERS)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"kv_transfer.listen_host {host!r}, listen_port {port}: {error.strerror}; choose another one"
        ) from error
    return listener


def _receive(connection: socket.socket, into: memoryview, within: float | None, idle: float | None = None) -> None:
    """Fill a buffer, within so many seconds or with at most `idle` ones without a byte. Raises OSError."""
    end = None if within is None else time.monotonic() + within
    while into:
        connection.settimeout(idle if end is None else max(0.001, end - time.monotonic()))
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("closed by the peer")
        into = into[count:]
