"""Connections: a bounded number of places, which one is given up when none is left, and how connections come to theirs.

A place is taken when a connection is accepted, so a TLS handshake that never ends takes one as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.system.log_lines import LimitedLog

logger = logging.getLogger(__name__)

SPARE = "pegboard.spare"
"""In a scope's state: the request came in a spare place, which is for health probes."""
SPARE_PLACES = 64
"""Connections beyond the limit, for health probes; everything else is refused there."""
IDLE_GRACE = 1.0
"""Seconds that a connection may be idle while others wait for its place."""
SLOW_GRACE = 10.0
"""Seconds that a body may take to arrive, or an answer's rest to be read, while others wait for the place."""
HANDSHAKE_SECONDS = 10.0
"""What a TLS handshake may take."""
CLOSING_SECONDS = 2.0
"""What the other side may take to say goodbye in TLS."""
SPARE_SECONDS = 2.0
"""What a connection in a spare place may take for its handshake, and then for its request and the answer."""
_AT_ONCE = 64
"""Most connections that are accepted in one turn of the loop, so that a probe behind a crowd is soon read."""
_AT_ONCE_SPARE = 8
"""The same where places run short: far fewer than spare places, so that the first of a crowd can be read from before
the last takes its place."""


class Place:
    """One connection's place. `end(at_once)` ends the connection; False where it has not, because its client still
    reads an answer, and need not at once. It is replaced as the connection comes along.
    """

    __slots__ = ("_places", "end", "spare")

    def __init__(self, places: Places, *, spare: bool) -> None:
        self._places = places
        self.spare = spare
        self.end: Callable[[bool], bool] = lambda at_once: True

    def is_idle(self) -> None:
        """Note that the connection waits for a request, from now on."""
        self._places.note(self, idle=True)

    def is_slow(self) -> None:
        """Note that it waits, from now on, for a body, or for its client to read the rest of an answer."""
        self._places.note(self, slow=True)

    def is_busy(self) -> None:
        """Note that it waits for us."""
        self._places.note(self)

    def leave(self) -> None:
        """Give the place up. May be called again."""
        self._places.free(self)


class Places:
    """The places of a server: `most`, and a few spare ones beyond.

    When all are taken, the connection that has been idle for the longest time makes room for a new one, or else the
    slowest one. Where every one is at work, new ones get spare places, of which the oldest makes room: a crowd that
    does not let go of them keeps no probe out.
    """

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._inside: set[Place] = set()
        self._spare: dict[Place, None] = {}
        # Each in the order of its times.
        self._idle: dict[Place, float] = {}
        self._slow: dict[Place, float] = {}
        self._log = LimitedLog(logger, most=1, seconds=60.0, clock=clock)

    @property
    def taken(self) -> int:
        """Places that are taken, spare ones not among them."""
        return len(self._inside)

    @property
    def free_places(self) -> int:
        """Places that are free, spare ones not among them."""
        return max(0, self._most - len(self._inside))

    @property
    def spare_taken(self) -> int:
        return len(self._spare)

    def take(self) -> Place:
        """Return a place for a connection that was accepted just now and waits for its first request."""
        if len(self._inside) >= self._most:
            self._make_room()
        place = Place(self, spare=len(self._inside) >= self._most)
        if place.spare:
            if len(self._spare) >= SPARE_PLACES:
                self._end(next(iter(self._spare)), at_once=True)
            self._spare[place] = None
        else:
            self._inside.add(place)
            place.is_idle()
        return place

    def note(self, place: Place, *, idle: bool = False, slow: bool = False) -> None:
        """Note what a connection waits for now."""
        self._idle.pop(place, None)
        self._slow.pop(place, None)
        if place in self._inside and (idle or slow):
            (self._idle if idle else self._slow)[place] = self._clock()

    def free(self, place: Place) -> None:
        """Free the place of a connection that has ended, or will."""
        self._inside.discard(place)
        self._spare.pop(place, None)
        self._idle.pop(place, None)
        self._slow.pop(place, None)

    def _make_room(self) -> None:
        self._log.log(
            logging.WARNING,
            "all %d connections are taken (server.max_connections): idle ones are closed for new ones, and where none "
            "is idle, new ones get 503",
            self._most,
        )
        while (idle := _first(self._idle, self._clock() - IDLE_GRACE)) is not None:
            if self._end(idle):
                return
        if (slow := _first(self._slow, self._clock() - SLOW_GRACE)) is not None:
            self._end(slow, at_once=True)

    def _end(self, place: Place, *, at_once: bool = False) -> bool:
        if not place.end(at_once):
            place.is_slow()
            return False
        self.free(place)
        return True


def _first(waiting: dict[Place, float], until: float) -> Place | None:
    """Return the one that has waited for the longest time, if that was at `until` already."""
    first = next(iter(waiting), None)
    return first if first is not None and waiting[first] <= until else None


class Acceptor:
    """Accepts connections of a listening socket and gives each a place and a protocol.

    Once the protocol is connected, its place is its own affair: it says what it waits for, and leaves at the end.
    """

    def __init__(
        self,
        listener: socket.socket,
        places: Places,
        protocol: Callable[[Place], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._listener = listener
        self._places = places
        self._protocol = protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        self._again: asyncio.TimerHandle | None = None
        self._log = LimitedLog(logger, most=1, seconds=60.0)
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more, and end what is not connected yet. The socket stays open: new clients wait."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        for connection in self._opening.values():
            _hang_up(connection)

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE if self._places.free_places > _AT_ONCE else _AT_ONCE_SPARE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No file is left, most likely. The socket stays readable: asking again at once would only burn time.
                self._log.log(logging.ERROR, "connections cannot be accepted: %s", error)
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(1.0, self._listen)
                return
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        place = self._places.take()
        place.end = lambda at_once: _hang_up(connection)
        task = self._loop.create_task(self._connect(connection, place))
        self._opening[task] = connection
        task.add_done_callback(self._opening.pop)

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        limits = {}
        if self._tls is not None:
            seconds = min(SPARE_SECONDS, self._handshake_seconds) if place.spare else self._handshake_seconds
            limits = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": CLOSING_SECONDS}
        connected = False
        try:
            with contextlib.suppress(OSError):
                # An OSError is the client's doing: it left, took too long, or speaks no TLS.
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(place), connection, ssl=self._tls, **limits
                )
                connected = True
        finally:
            if not connected:
                place.leave()


def _hang_up(connection: socket.socket) -> bool:
    """End a connection that a transport may have already, which then notices that nothing comes any more."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return True


def no_connection_left() -> InvalidRequest:
    """Return the refusal of what came in a spare place and is not a health probe, or stays too long."""
    return InvalidRequest("the server has no connection left, try again later", status=503, code="busy")
