"""What the large bodies of all requests share: room, and turns at the parser."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator

from pegboard.core.interfaces.errors import InvalidRequest

PATIENCE = 10.0
"""Seconds that a body waits for room, and that one beyond the budget may take to arrive."""


class BodyBudget:
    """Room for the bodies of all requests: `most` bytes, and whatever one more body needs to arrive.

    Bodies take room as they arrive, so several can fill it without any of them being complete. The one that goes
    beyond keeps them from waiting for each other.
    """

    def __init__(self, most: int, patience: float = PATIENCE) -> None:
        self._most = most
        self._patience = patience
        self._held = 0
        self._beyond: BodyShare | None = None
        self._waiting: collections.deque[tuple[BodyShare, int, asyncio.Future[None]]] = collections.deque()

    @property
    def held(self) -> int:
        """Bytes that all shares hold."""
        return self._held

    async def take(self, share: BodyShare, size: int) -> None:
        """Have `share` hold `size` bytes more. Raises InvalidRequest (503) where there is no room in time."""
        if (share is self._beyond or not self._waiting) and self._grant(share, size):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, size, granted))
        try:
            async with asyncio.timeout(self._patience):
                await granted
        except TimeoutError:
            raise budget_full() from None
        finally:
            granted.cancel()
            self._serve()

    def give(self, share: BodyShare) -> None:
        """Take back all that `share` holds."""
        self._held -= share.held
        share.held = 0
        self.arrived(share)

    def arrived(self, share: BodyShare) -> None:
        """Note that the body of `share` needs no more room."""
        if share is self._beyond:
            self._beyond, share.deadline = None, None
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            share, size, granted = self._waiting[0]
            if not granted.done():
                if not self._grant(share, size):
                    return
                granted.set_result(None)
            self._waiting.popleft()

    def _grant(self, share: BodyShare, size: int) -> bool:
        if self._held + size > self._most and share is not self._beyond:
            if self._beyond is not None or self._held > self._most:
                return False
            self._beyond = share
            share.deadline = asyncio.get_running_loop().time() + self._patience
        self._held += size
        share.held += size
        return True


class BodyShare:
    """What one body holds of a budget, and the time by the loop's clock by which it must have arrived, if any."""

    __slots__ = ("deadline", "held")

    def __init__(self) -> None:
        self.held = 0
        self.deadline: float | None = None


def budget_full() -> InvalidRequest:
    """The refusal of a body for which there is no room."""
    message = "the server holds too many large request bodies, try again later"
    return InvalidRequest(message, status=503, code="bodies_full")


class ParseTurns:
    """Lets large bodies be parsed one by one. Parsers hold the interpreter's lock, so behind each comes a pause as long
    as its turn, which belongs to everything else.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One body's turn."""
        await self._lock.acquire()
        began = time.monotonic()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - began, self._lock.release)
