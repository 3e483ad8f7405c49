"""Connections to the other servers, in a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from pegboard.plugins.disagg.connection import Connection
from pegboard.plugins.disagg.events import Address, Event, Failed, Lost, Said
from pegboard.plugins.disagg.handshake import Answering, Connecting, Self
from pegboard.plugins.disagg.link import Link, LinkLimits
from pegboard.plugins.disagg.messages import AboutRooms
from pegboard.toolkit.system.log_lines import LimitedLog

logger = logging.getLogger(__name__)

MAX_EVENTS = 16384
"""Messages that wait for the scheduler's loop at most. Then the oldest are left out: a loop that has not asked for so
long has no room that they are of.
"""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before an address is tried again, after one failure and after many."""
TICK = 0.1


@dataclass(frozen=True, slots=True)
class NetworkLimits:
    """Connections that are taken and opened at most, and what each of them has."""

    connections: int = 64
    link: LinkLimits = field(default_factory=LinkLimits)


@dataclass(slots=True)
class _Dialled:
    """An address that was asked for. `failures` since it last worked, and when it may be tried again."""

    connection: Connection | None = None
    trying: bool = False
    failures: int = 0
    not_before: float = 0.0


class ThreadedNetwork:
    """A Network over TCP; with a socket it listens. `close` ends the thread."""

    def __init__(self, own: Self, limits: NetworkLimits, listening: socket.socket | None = None) -> None:
        self._own, self._limits, self._listening = own, limits, listening
        self._port: int | None = None if listening is None else listening.getsockname()[1]
        self._numbers = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self._dialled: dict[Address, _Dialled] = {}
        self._inbox: deque[Event] = deque()
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = LimitedLog(logger, most=20, seconds=10.0)
        self.left_out = 0
        """Messages that were left out because the scheduler's loop did not ask."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="disagg", daemon=True)
        self._thread.start()

    # ---- for the scheduler's thread -------------------------------------------------------------------------------

    def dial(self, address: Address) -> None:
        self._soon(lambda: self._dial(address))

    def send(self, link: int, message: AboutRooms) -> None:
        self._soon(lambda: self._send(link, message))

    def events(self) -> Sequence[Event]:
        if not self._inbox:
            return ()
        with self._lock:
            events, self._inbox = self._inbox, deque()
        return events

    def close(self) -> None:
        """End all connections, and the thread."""
        self._soon(self._loop.stop)
        self._thread.join(5.0)

    def _soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("the network was closed before")

    @property
    def port(self) -> int:
        """Where it listens; 0 where it does not."""
        return 0 if self._port is None else self._port

    # ---- of connections -------------------------------------------------------------------------------------------

    def made(self, connection: Connection) -> None:
        """Learn that there is a socket. Where there are too many, the one that says nothing for longest goes."""
        self._connections[connection.number] = connection
        if not self._own.secret and not ip_address(connection.peername.partition("%")[0] or "::").is_loopback:
            connection.link.end("it is not on this machine, and there is no `secret_file`")
        while len(self._connections) > self._limits.connections:
            unknown = [one for one in self._connections.values() if not one.opened]
            victim = unknown[0] if unknown else connection
            victim.link.end("there are too many connections")
            victim.flush()
            del self._connections[victim.number]

    def tell(self, event: Event) -> None:
        with self._lock:
            self._inbox.append(event)
            if len(self._inbox) > MAX_EVENTS:
                self._leave_out()

    def ended(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        link, address = connection.link, connection.address
        if connection.opened:
            self._log.log(logging.WARNING, "the connection with %s has ended: %s", connection.peername, link.reason)
            self.tell(Lost(connection.number, link.reason, link.silent))
        elif address is None and link.refused:
            self._log.log(logging.WARNING, "a server at %s was refused: %s", connection.peername, link.reason)
        dialled = None if address is None else self._dialled.get(address)
        if address is not None and dialled is not None and dialled.connection is connection:
            dialled.connection = None
            if connection.opened:
                dialled.failures = 0
            else:
                self._failed(address, link.reason, refused=link.refused)

    def _leave_out(self) -> None:
        """Leave the oldest message out; that connections come and go is told in any case."""
        for place, event in enumerate(self._inbox):
            if isinstance(event, Said):
                del self._inbox[place]
                self.left_out += 1
                return

    # ---- the network's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            if self._listening is not None:
                self._loop.run_until_complete(self._loop.create_server(self._accepted, sock=self._listening))
            self._loop.call_soon(self._tick)
            self._loop.run_forever()
        except Exception:
            logger.exception("the network of the gate has failed")
        finally:
            self._end()

    def _end(self) -> None:
        for connection in list(self._connections.values()):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        if self._listening is not None:
            self._listening.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _tick(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            try:
                connection.tick(now)
            except Exception:
                # Without the next tick no connection would ever be found silent.
                logger.exception("the connection with %s is ended", connection.peername)
                connection.abort()
        self._loop.call_later(TICK, self._tick)

    def _accepted(self) -> Connection:
        link = Link(Answering(self._own), time.monotonic(), self._limits.link)
        return Connection(self, next(self._numbers), link, None)

    def _send(self, link: int, message: AboutRooms) -> None:
        connection = self._connections.get(link)
        if connection is not None:
            connection.link.send(message)
            connection.flush()

    def _dial(self, address: Address) -> None:
        dialled = self._dialled.get(address)
        if dialled is None:
            self._forget_old()
            dialled = self._dialled[address] = _Dialled()
        if dialled.trying or dialled.connection is not None:
            return
        dialled.trying = True
        task = self._loop.create_task(self._connect(address, dialled))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: Address, dialled: _Dialled) -> None:
        await asyncio.sleep(max(0.0, dialled.not_before - time.monotonic()))
        link = Link(Connecting(self._own), time.monotonic(), self._limits.link)
        connection = Connection(self, next(self._numbers), link, address)
        opening = self._limits.link.opening
        dialled.connection, dialled.trying = connection, False
        try:
            await asyncio.wait_for(self._loop.create_connection(lambda: connection, *address), opening)
        except TimeoutError:
            self._failed(address, f"no connection within {opening:g} s")
        except (OSError, UnicodeError, ValueError) as error:
            self._failed(address, getattr(error, "strerror", None) or str(error))

    def _failed(self, address: Address, reason: str, *, refused: bool = False) -> None:
        dialled = self._dialled.setdefault(address, _Dialled())
        dialled.connection = None
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(dialled.failures, 16))
        dialled.failures, dialled.not_before = dialled.failures + 1, time.monotonic() + pause
        what = "and this decode server do not go together" if refused else "cannot be connected to"
        text = f"the prefill server {address} {what}: {reason}"
        self._log.log(logging.WARNING, "%s", text)
        self.tell(Failed(address, text, 409, "prefill_refused") if refused else Failed(address, text))

    def _forget_old(self) -> None:
        """Keep no more addresses than there may be connections: first those go that do not work."""
        idle = [at for at, one in self._dialled.items() if one.connection is None and not one.trying]
        for address in idle[: max(0, len(self._dialled) - self._limits.connections + 1)]:
            del self._dialled[address]
