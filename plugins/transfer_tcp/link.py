"""The reader: a thread with one connection to a peer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pegboard.plugins.kv_handoff.api.listening import unreached
from pegboard.plugins.kv_handoff.api.protocol import BadFrame, pack_request
from pegboard.plugins.transfer_tcp.answers import Incoming
from pegboard.plugins.transfer_tcp.frames import MAGIC
from pegboard.plugins.transfer_tcp.streams import new_buffer

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.kv_handoff.api.leases import Counts
    from pegboard.plugins.kv_handoff.api.pieces import Memory
    from pegboard.plugins.transfer_tcp.options import TcpOptions
    from pegboard.plugins.transfer_tcp.reads import Part

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Requests that are under way on a connection, so that the source always knows what comes next."""
LOOK = 0.2
"""Seconds after which the clock is looked at, at the latest."""


class Place(NamedTuple):
    """Where a peer is read from."""

    host: str
    port: int
    token: bytes


class Link:
    """Reads parts one after the other. What is under way fails with the connection, and the next part makes a new one.

    `submit`, `nudge` and `stop` are for the engine's thread; the rest happens in the link's own. Only that one writes
    to targets, so a part that it has ended is written to no more.
    """

    def __init__(self, place: Place, memory: Memory, options: TcpOptions, clock: Clock, counts: Counts) -> None:
        self.given = 0
        """Bytes that it has been given to read."""
        self.settled = 0
        """Bytes of those that have ended."""
        self.resolving = False
        """Whether it waits for the address of a host's name, which cannot be ended."""
        self._place = place
        self._memory = memory
        self._options = options
        self._clock = clock
        self._counts = counts
        self._inbox: deque[Part] = deque()
        self._waiting: deque[Part] = deque()
        self._coming: deque[Incoming] = deque()
        self._unsent = b""
        self._numbers = itertools.count(1)
        self._buffer = new_buffer()
        self._socket: socket.socket | None = None
        self._stopped = False
        self._heard = clock()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self.thread = threading.Thread(target=self._run, name=f"kv-read-{place.host}:{place.port}", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the system gives no more threads
            self._bell.close()
            self._ringer.close()
            raise

    def submit(self, part: Part) -> None:
        """Read a part, after those before it."""
        self.given += part.nbytes
        self._inbox.append(part)
        self.nudge()

    def nudge(self) -> None:
        """Have it look for new parts, and for reads that have been stopped."""
        with contextlib.suppress(OSError):  # it has enough to read already, or has ended
            self._ringer.send(b"!")

    def stop(self) -> None:
        """Let it end, without waiting for that; its parts are given up."""
        self._stopped = True
        self.nudge()

    def join(self) -> None:
        """Wait for its end, but not for a name server."""
        while self.thread.is_alive() and not self.resolving:
            self.thread.join(0.1)

    # ---- its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._try(self._connect, self._lose_all)
            while not self._stopped:
                if self._socket is not None:
                    self._try(self._serve, self._lose)
                elif self._waiting:
                    self._try(self._connect, self._lose_all)
                else:
                    self._wait(None)
        finally:
            self._stopped = True
            self._lose_all("the reader has ended")
            self._bell.close()
            self._ringer.close()

    def _try(self, work: Callable[[], None], lose: Callable[[str], None]) -> None:
        try:
            work()
        except Exception as error:
            why = f"{self._place.host}:{self._place.port}: {error}"
            if not isinstance(error, OSError | BadFrame):
                logger.exception("reading KV from %s has failed", why)
            else:
                logger.debug("KV cannot be read from %s", why)
            lose(why)

    def _lose_all(self, why: str) -> None:
        """Close the connection; what is under way or waits fails."""
        self._lose(why)
        for part in self._waiting:
            self._end(part, why)
        self._waiting.clear()

    def _lose(self, why: str) -> None:
        """Close the connection; what is under way fails, and with it what waits of the same reads."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for one in self._coming:
            self._end(one.part, "" if self._stopped or one.part.read.stopped else why)
        self._coming.clear()
        self._unsent = b""
        self._take()

    def _end(self, part: Part, why: str = "") -> None:
        """End a part that is not complete: it failed, or is not wanted any more."""
        if not part.ended:
            part.end(why, given_up=not why)
            self.settled += part.nbytes

    def _take(self) -> None:
        """Take new parts over, and end those that are not wanted any more."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        for part in (*self._waiting, *(one.part for one in self._coming)):
            if self._stopped or part.read.stopped:
                self._end(part)
        self._waiting = deque(part for part in self._waiting if not part.ended)

    def _connect(self) -> None:
        self._heard = self._clock()
        self.resolving = True
        try:
            found = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
        finally:
            self.resolving = False
        error: OSError = ConnectionError("the peer's name has no address")
        for family, kind, protocol, _, address in found:
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._begin(self._socket, address)
                return
            except OSError as failed:
                error = failed
                self._socket.close()
                self._socket = None
        raise error

    def _reach(self, connection: socket.socket, address: tuple[object, ...], end: float) -> None:
        """Connect, or return early when the link is stopped. Raises OSError, with what to do."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(BlockingIOError):
                connection.connect(address)
            self._await(select.POLLOUT, end)
            if not self._stopped and (code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            raise ConnectionError(f"{error.strerror or error}{unreached(str(address[0]))}") from error

    def _begin(self, connection: socket.socket, address: tuple[object, ...]) -> None:
        """Connect, and say hello. Returns early when the link is stopped."""
        end = self._heard + self._options.connect_timeout
        self._reach(connection, address, end)
        if self._stopped:
            return
        connection.send(MAGIC + self._place.token)
        welcome = b""
        while len(welcome) < len(MAGIC) and not self._stopped:
            self._await(select.POLLIN, end)
            with contextlib.suppress(BlockingIOError):
                more = connection.recv(len(MAGIC) - len(welcome))
                if not more:
                    raise ConnectionRefusedError("the peer has closed the connection: it is another one by now")
                welcome += more
        if welcome != MAGIC and not self._stopped:
            raise BadFrame("what answers is not a source of KV")

    def _await(self, what: int, end: float) -> None:
        while not self._stopped:
            if self._wait(what):
                return
            if self._clock() >= end:
                raise TimeoutError(f"no connection within {self._options.connect_timeout:g} s")

    def _wait(self, what: int | None, seconds: float | None = LOOK) -> int:
        """Wait for the bell, and for events of the connection; return these. For ever where `what` is None."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, what or select.POLLIN)
        happened = 0
        for number, event in poller.poll(None if what is None or seconds is None else seconds * 1000):
            if number == self._bell.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
                self._take()
            else:
                happened = event
        return happened

    def _serve(self) -> None:
        """Ask for parts and read them, until the link is stopped. Raises OSError and BadFrame."""
        while not self._stopped:
            self._ask()
            busy = bool(self._coming)
            what = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            happened = self._wait(what, LOOK if busy else None)
            if happened & select.POLLOUT:
                self._send()
            if happened & ~select.POLLOUT:
                self._receive()
            if busy and self._clock() - self._heard > self._options.timeout:
                raise TimeoutError(f"nothing came for {self._options.timeout:g} s")

    def _ask(self) -> None:
        """Ask for the next parts."""
        while self._waiting and len(self._coming) < AT_ONCE:
            part = self._waiting.popleft()
            if not self._coming:
                self._heard = self._clock()
            number = next(self._numbers)
            self._coming.append(Incoming(number, part, self._memory, self._buffer))
            self._unsent += pack_request(number, part.lease, part.source)
            self._send()

    def _send(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
            self._heard = self._clock()

    def _receive(self) -> None:
        """Receive once, as much as there is room for."""
        assert self._socket is not None
        buffers = self._coming[0].buffers() if self._coming else [memoryview(bytearray(1))]
        try:
            count = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return
        if not count:
            raise ConnectionResetError("the peer has closed the connection")
        if not self._coming:
            raise BadFrame("bytes that were not asked for")
        self._heard = self._clock()
        self._counts.add("received_bytes_total", count)
        first = self._coming[0]
        ended = first.part.ended
        first.advance(count)
        if first.complete:
            self._coming.popleft()
            if not ended:
                self.settled += first.part.nbytes
