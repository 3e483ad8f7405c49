"""Turns: how many requests begin between two looks at the network."""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from pegboard.toolkit.http.levels import NEEDED_LEVEL

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

AT_ONCE = 64
"""Requests that begin in one turn of the loop, so that the scheduler has them in one batch: up to 50 ms of work."""
OF_A_CROWD = 4
"""The same while more wait: a few milliseconds."""


class Turns:
    """Lets `at_once` requests begin in one turn of the event loop, in the order in which they came. Of more, the others
    begin a few in each turn.

    A thousand requests that arrive together would otherwise all begin before the loop looks at anything else: a second
    in which no token is sent and no health probe is answered.
    """

    def __init__(self, at_once: int = AT_ONCE, of_a_crowd: int = OF_A_CROWD) -> None:
        self._at_once = at_once
        self._of_a_crowd = of_a_crowd
        self._left = at_once
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._counting = False

    async def begin(self) -> None:
        """Return when it is this request's turn: at once where few have begun."""
        self._count()
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _count(self) -> None:
        """Have the next turn of the loop counted, unless that is arranged."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._counting = False
        crowded = bool(self._waiting) or not self._left
        self._left = self._of_a_crowd if crowded else self._at_once
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if crowded:
            self._count()


class InTurns:
    """ASGI middleware: requests begin in their turn, those at public routes (health probes) at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["state"][NEEDED_LEVEL] != "public":
            await self._turns.begin()
        await self._app(scope, receive, send)
