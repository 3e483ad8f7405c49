"""One socket of the network's thread, with the link that it carries."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from pegboard.plugins.disagg import health
from pegboard.plugins.disagg.events import Address, Event, Opened, Said
from pegboard.plugins.disagg.link import Link

LAST_WORDS = 1.0
"""Seconds in which the last bytes of a link that is over may leave."""


class Owner(Protocol):
    """What a connection belongs to."""

    def made(self, connection: Connection) -> None:
        """Learn that there is a socket."""

    def tell(self, event: Event) -> None:
        """Have an event told."""

    def ended(self, connection: Connection) -> None:
        """Learn that the socket is closed."""


class Connection(asyncio.Protocol):
    """Bytes between a socket and a link. `address` is what was dialled; where it is None, the connection was accepted,
    and may be a health check.
    """

    def __init__(self, owner: Owner, number: int, link: Link, address: Address | None) -> None:
        self._owner = owner
        self.number, self.link, self.address = number, link, address
        self.opened = False
        """Whether the handshake was told of."""
        self._transport: asyncio.Transport | None = None
        self._head: bytearray | None = bytearray() if address is None else None
        """What has come, until it is clear that it is not HTTP."""
        self._closed_at: float | None = None

    @property
    def peername(self) -> str:
        """The other side's IP address, "" where there is none."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._owner.made(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            if health.may_be_http(self._head):
                self._answer_http(bytes(self._head))
                return
            data, self._head = bytes(self._head), None
        said = self.link.receive(data, time.monotonic())
        if not self.opened and self.link.peer is not None:
            self.opened = True
            self._owner.tell(Opened(self.number, self.address, self.link.peer))
        for message in said:
            self._owner.tell(Said(self.number, message))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.end("the connection was closed" if exc is None else f"the connection broke: {exc}")
        self._owner.ended(self)

    def tick(self, now: float) -> None:
        self.link.tick(now)
        self.flush()
        if self._closed_at is not None and now - self._closed_at >= LAST_WORDS:
            self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        """Give the socket what the link has to say, and close it after the last word."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = self.link.output()
        if data:
            transport.write(data)
        self.link.waiting(transport.get_write_buffer_size())
        if self.link.over:
            self._close(transport)

    def _answer_http(self, head: bytes) -> None:
        answer = health.answer(head)
        if answer is not None and self._transport is not None:
            self._transport.write(answer)
            self.link.end("it was a health check")
            self._close(self._transport)

    def _close(self, transport: asyncio.Transport) -> None:
        self._closed_at = time.monotonic()
        transport.close()
