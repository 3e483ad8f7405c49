"""What the large bodies of all requests share: room, and turns at the parser."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from pegboard.core.interfaces.errors import InvalidRequest

PATIENCE = 10.0
"""Seconds that a body waits for room, and that one beyond the budget may take to arrive."""
GRACE = 5.0
"""Seconds that a body may take to arrive while others wait for room, not counting its own waiting. Less than PATIENCE:
those that wait get the room of senders that have stalled."""


class BodyBudget:
    """Room for the bodies of all requests: `most` bytes, and whatever one more body needs to arrive.

    Bodies take room as they arrive, so several can fill it without any of them being complete. The one that goes
    beyond keeps them from waiting for each other. Those that have stalled lose their room as soon as others wait.
    """

    def __init__(self, most: int, patience: float = PATIENCE, grace: float = GRACE) -> None:
        self._most = most
        self._patience = patience
        self._grace = grace
        self._held = 0
        self._arriving: set[BodyShare] = set()
        self._beyond: BodyShare | None = None
        self._beyond_until = 0.0
        self._waiting: collections.deque[tuple[BodyShare, int, asyncio.Future[None]]] = collections.deque()

    @property
    def held(self) -> int:
        """Bytes that all shares hold."""
        return self._held

    async def take(self, share: BodyShare, size: int) -> None:
        """Have `share` hold `size` bytes more. Raises InvalidRequest (503) where there is no room in time."""
        began = asyncio.get_running_loop().time()
        if share not in self._arriving:
            share.began = began
            self._arriving.add(share)
        if (share is self._beyond or not self._waiting) and self._grant(share, size):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, size, granted))
        self._set_deadlines()
        try:
            async with asyncio.timeout(self._patience):
                await granted
        except TimeoutError:
            raise budget_full() from None
        finally:
            share.began += asyncio.get_running_loop().time() - began
            granted.cancel()
            self._serve()

    def shrink(self, share: BodyShare, size: int) -> None:
        """Have `share` hold `size` bytes at most."""
        less = max(0, share.held - size)
        self._held -= less
        share.held -= less
        self._serve()

    def give(self, share: BodyShare) -> None:
        """Take back all that `share` holds."""
        self.shrink(share, 0)
        self.arrived(share)

    def arrived(self, share: BodyShare) -> None:
        """Note that the body of `share` needs no more room."""
        self._arriving.discard(share)
        if share is self._beyond:
            self._beyond = None
        share.end_by(None)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            share, size, granted = self._waiting[0]
            if not granted.done():
                if not self._grant(share, size):
                    break
                granted.set_result(None)
            self._waiting.popleft()
        self._set_deadlines()

    def _set_deadlines(self) -> None:
        for share in self._arriving:
            times = [share.began + self._grace] if self._waiting else []
            if share is self._beyond:
                times.append(self._beyond_until)
            share.end_by(min(times, default=None))

    def _grant(self, share: BodyShare, size: int) -> bool:
        if self._held + size > self._most and share is not self._beyond:
            if self._beyond is not None or self._held > self._most:
                return False
            self._beyond = share
            self._beyond_until = asyncio.get_running_loop().time() + self._patience
            share.end_by(self._beyond_until)
        self._held += size
        share.held += size
        return True


class BodyShare:
    """What one body holds of a budget, and the time by the loop's clock by which it must have arrived, if any."""

    __slots__ = ("_timeout", "began", "deadline", "held")

    def __init__(self) -> None:
        self.held = 0
        self.began = 0.0
        """When it first asked for room, and later by as long as it has waited for it."""
        self.deadline: float | None = None
        self._timeout: asyncio.Timeout | None = None

    def end_by(self, deadline: float | None) -> None:
        """Set the deadline, also of what is being waited for now."""
        if deadline == self.deadline:
            return
        self.deadline = deadline
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(deadline)

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Wait for more of the body in here. Raises InvalidRequest (408) once the deadline has passed."""
        try:
            async with asyncio.timeout_at(self.deadline) as self._timeout:
                yield
        except TimeoutError:
            message = "the body did not arrive in time, while the server holds too many large ones; try again later"
            raise InvalidRequest(message, status=408, code="too_slow") from None
        finally:
            self._timeout = None


def budget_full() -> InvalidRequest:
    """Return the refusal of a body for which there is no room."""
    message = "the server holds too many large request bodies, try again later"
    return InvalidRequest(message, status=503, code="bodies_full")


class ParseTurns:
    """Lets large bodies be parsed one by one. Parsers hold the interpreter's lock, so after each comes a pause as long
    as its turn, which belongs to everything else.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, parsed: Callable[[int], None]) -> AsyncIterator[Callable[[int], None]]:
        """One body's turn, in which `parsed` is told how much memory its values take."""
        await self._lock.acquire()
        began = time.monotonic()
        try:
            yield parsed
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - began, self._lock.release)
