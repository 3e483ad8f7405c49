"""uvicorn's server on an open socket, without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.http.protocol import StreamingProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pegboard.core.interfaces.http_front import Accepting, HttpFront, HttpGuard

KEEP_ALIVE = 60
"""Seconds that a connection may be idle, where places are not short."""
LAST_ANSWERS = 5
"""Seconds that connections get to read what was written for them, after the last request has ended."""


class HttpServer(uvicorn.Server):
    """Serves an application on a listening socket, until `leave`.

    Its connections are accepted by the first guard that does so. uvicorn's signal handling would cut running requests
    off, so it is left out. It wakes up once per second for the date, and not ten times to see whether it is to end.
    """

    def __init__(self, app: ASGIApp, front: HttpFront, guards: Sequence[HttpGuard] = ()) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=StreamingProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=LAST_ANSWERS,
            )
        )
        self._front = front
        self._guards = tuple(guards)
        self._accepting: Accepting | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End, once running answers have."""
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        accepting = (guard.accept(self._front, self) for guard in self._guards)
        self._accepting = next((found for found in accepting if found is not None), None)
        self.config.ssl = self._front.tls
        await super().startup(sockets=[self._front.listener] if self._accepting is None else [])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.close()
        await super().shutdown([self._front.listener])

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listening(self, serving: asyncio.Future[None]) -> None:
        """Return once connections are accepted. Raises PegboardError where that fails."""
        while not self.started:
            if serving.done():
                error = serving.exception()
                raise PegboardError(f"cannot listen: {error or 'the HTTP server ended'}") from None
            await asyncio.sleep(0.01)
