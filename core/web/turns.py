"""Turns: how many requests begin between two looks at the network."""

from __future__ import annotations

import asyncio
import collections

AT_ONCE = 4
"""Requests that begin in one turn of the loop: a few milliseconds of work."""


class Turns:
    """Lets `at_once` requests begin in each turn of the event loop, in the order in which they came.

    A thousand requests that arrive together would otherwise all begin before the loop looks at anything else: a second
    in which no token is sent and no health probe is answered.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
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
        self._left = self._at_once
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._count()
