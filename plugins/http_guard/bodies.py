"""Request bodies: unpacked, bounded by what a parser makes of them, and by the memory of all together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.http_guard.body_budget import BodyBudget, BodyShare, ParseTurns
from pegboard.plugins.http_guard.encodings import Unpacked, encoding_of
from pegboard.plugins.http_guard.memory import MemoryReturn
from pegboard.toolkit.http.bodies import ANY_SIZE, MOST_BODY, PARSE_TURN, SMALL_BODY, too_large
from pegboard.toolkit.http.body_room import GIVE_BODY_ROOM
from pegboard.toolkit.parsing.json_weight import JsonWeight

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

WIDE = 4
"""Bytes that a byte of a text takes in memory where one of its characters lies beyond Unicode's first plane."""


class BodyGuard:
    """ASGI middleware: unpacks request bodies (Content-Encoding), refuses those with more values than a parser should
    make (`values`) with 413, and lets no more arrive than there is room for: `together` bytes of all bodies.

    Small bodies need no room: whatever large ones are under way, they get through. Files (routes that declare STREAMED)
    need none either, since they are not kept in memory. A large body holds room for its values until the engine has
    taken the request over, and until its end for those of which the engine knows nothing.
    """

    def __init__(self, app: ASGIApp, values: int, together: int) -> None:
        self._app = app
        self._values = values
        self._budget = BodyBudget(together)
        self._turns = ParseTurns()
        self._memory = MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        encoding = encoding_of(scope["headers"])
        extensions = scope["extensions"]
        most: int = extensions[MOST_BODY]
        unpacked = None
        if encoding is not None:
            # What is announced is not what will be parsed.
            unpacked = Unpacked(receive, encoding, most)
            receive, announced = unpacked.receive, None
        if most == ANY_SIZE or (announced is not None and int(announced) <= SMALL_BODY):
            await self._app(scope, receive, send)
            return
        arriving = _Arriving(receive, most, self._values, self._budget, self._memory, unpacked)
        extensions[PARSE_TURN] = partial(self._turns.turn, arriving.parsed)
        token = GIVE_BODY_ROOM.set(arriving.explained)
        try:
            await self._app(scope, arriving.receive, send)
        finally:
            GIVE_BODY_ROOM.reset(token)
            arriving.end()


class _Arriving:
    """A body on its way in."""

    def __init__(
        self,
        receive: Receive,
        most: int,
        values: int,
        budget: BodyBudget,
        memory: MemoryReturn,
        unpacked: Unpacked | None = None,
    ) -> None:
        self._receive = receive
        self._most = most
        self._values = values
        self._budget = budget
        self._memory = memory
        self._unpacked = unpacked
        self._size = 0
        self._weight = JsonWeight()
        self.share = BodyShare()

    def parsed(self, size: int) -> None:
        """Its bytes are gone, and its values take this much memory."""
        self._budget.shrink(self.share, size)
        self._memory.soon()

    def explained(self, size: int) -> None:
        """Leave so many bytes of the values out: the engine has an account of its own of them."""
        rest = self.share.held - size
        self._budget.shrink(self.share, rest if rest > SMALL_BODY else 0)

    def end(self) -> None:
        """Its request has ended."""
        self._budget.give(self.share)
        if self._size > SMALL_BODY:
            self._memory.soon()

    async def receive(self) -> Message:
        """Return the next message. Raises InvalidRequest where a bound is passed."""
        async with self.share.in_time():
            message = await self._receive()
        body = message.get("body", b"")
        if body:
            await self._add(body)
        if self._unpacked is not None and self._size > SMALL_BODY and self._unpacked.window == 0:
            self._budget.shrink(self.share, self._needed())
        if self.share.held and not message.get("more_body", False):
            self._budget.arrived(self.share)
        return message

    async def _add(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._most:
            raise too_large(self._most)
        self._weight.add(body)
        if self._weight.total > self._values:
            message = f"the body has more values than the {self._values} that are taken (server.max_body_values)"
            raise InvalidRequest(message, status=413, code="too_many_values")
        if self._size > SMALL_BODY:
            more = self._needed() - self.share.held
            if more > 0:
                await self._budget.take(self.share, more)

    def _needed(self) -> int:
        """Return bytes of memory for what is there, and for unpacking the rest."""
        window = 0 if self._unpacked is None else self._unpacked.window
        return self._size * (WIDE if self._weight.wide else 1) + window
