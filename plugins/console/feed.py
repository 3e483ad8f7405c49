"""The stream of events: one question to the scheduler, twice a second, for all who look at the page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.console.actions import LOOK
from pegboard.plugins.console.steps import KEPT
from pegboard.toolkit.http.events import event

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EngineClient

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Seconds between two questions."""
BUSY_S = 3.0
"""Seconds without an answer after which the page says so: the scheduler answers between two steps."""
MOST_VIEWERS = 16
MOST_EVENTS = 16
"""Events that wait for a viewer. One that reads more slowly loses the oldest, and is told how many."""


class Viewer:
    """One stream of events: what waits for it, and how many it has lost."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that it has lost, since its beginning."""
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._ended = False

    def put(self, frame: bytes) -> None:
        """Add an event, in place of the oldest one where too many wait."""
        if len(self._waiting) == MOST_EVENTS:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(frame)
        self._news.set()

    def end(self) -> None:
        """Let the stream end after what waits for it."""
        self._ended = True
        self._news.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield events as they come, and how many were lost before the next one."""
        told = 0
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                if self.dropped > told:
                    told = self.dropped
                    yield event({"dropped": told}, "dropped")
                yield self._waiting.popleft()
            if self._ended:
                return


class Feed:
    """Asks while there are viewers, and does nothing otherwise. Each answer is written once, for all of them."""

    def __init__(self, client: EngineClient, *, period: float = PERIOD_S, busy: float = BUSY_S) -> None:
        self._client = client
        self._period = period
        self._busy = busy
        self._viewers: set[Viewer] = set()
        self._asking: asyncio.Task[None] | None = None
        self._started = 0
        self._number = 0
        self._steps: deque[object] = deque(maxlen=KEPT)

    def open(self) -> Viewer:
        """Return a new viewer, which begins with the steps that are known. Raises InvalidRequest, 503, where there are
        too many.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            text = f"{MOST_VIEWERS} pages look at this server already: close one of them"
            raise InvalidRequest(text, code="too_many_viewers", status=503)
        viewer = Viewer()
        if self._asking is None:
            self._steps.clear()
            self._number = 0
            self._asking = asyncio.create_task(self._ask_on(), name="the console's questions")
        elif self._steps:
            viewer.put(event({"steps": list(self._steps)}, "steps"))
        self._viewers.add(viewer)
        return viewer

    async def close(self, viewer: Viewer) -> None:
        """Take a viewer out. After the last one nothing is asked any more."""
        self._viewers.discard(viewer)
        if not self._viewers and (asking := self._asking) is not None:
            self._asking = None
            asking.cancel()
            await asyncio.wait({asking})

    async def _ask_on(self) -> None:
        try:
            while await self._ask():
                await asyncio.sleep(self._period)
        except Exception:
            logger.exception("the console's questions have ended")
        finally:
            # Also after a fault of our own: a page that is told nothing connects anew. After `close` there may be
            # viewers again, for whom another task asks.
            if self._asking is asyncio.current_task():
                self._asking = None
                for viewer in self._viewers:
                    viewer.end()

    async def _ask(self) -> bool:
        """Ask once, and tell all viewers. Return whether to go on: not where the server is about to stop."""
        asked = asyncio.ensure_future(self._client.control(LOOK, {"since": self._number}))
        try:
            while not (await asyncio.wait({asked}, timeout=self._busy))[0]:
                self._tell("state", {"state": "busy", "message": "the scheduler has not answered for a while"})
            found = asked.result()
        except InvalidRequest as error:
            self._tell("state", {"state": "down", "message": error.message})
            return True
        finally:
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, InvalidRequest):
                await asked
        if not self._client.ready:
            self._tell("state", {"state": "stopping", "message": "the server is stopping"})
            return False
        self._learn(found)
        self._tell("look", found)
        return True

    def _learn(self, found: dict[str, object]) -> None:
        """Note the steps of an answer, and a scheduler that was started in another's place."""
        steps, started = found["steps"], found["started"]
        assert isinstance(steps, list)
        assert isinstance(started, int)
        if started != self._started:
            self._started = started
            self._number = 0
            self._steps.clear()
        self._steps.extend(steps)
        if steps:
            self._number = steps[-1][0]

    def _tell(self, name: str, data: dict[str, object]) -> None:
        frame = event(data, name)
        for viewer in self._viewers:
            viewer.put(frame)
