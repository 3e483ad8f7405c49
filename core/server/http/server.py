"""uvicorn's server, with bounds on connections and without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.server.http.connections import HANDSHAKE_SECONDS, Acceptor, Place, Places
from pegboard.core.server.http.protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

KEEP_ALIVE = 60
"""Seconds that a connection may be idle, where places are not short."""
LAST_ANSWERS = 5
"""Seconds that connections get to read what was written for them, after the last request has ended."""


class HttpServer(uvicorn.Server):
    """Serves an application on a listening socket, until `leave`.

    Its connections are accepted by an Acceptor of its own, since uvicorn knows of none before its TLS handshake has
    ended. uvicorn's signal handling would cut running requests off, so it is left out. It wakes up once per second
    for the date, and not ten times to see whether it is to end.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        max_connections: int,
        request_timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=LAST_ANSWERS,
            )
        )
        self.places = Places(max_connections)
        self._listener = listener
        self._request_timeout = request_timeout
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End, once running answers have."""
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        seconds = min(HANDSHAKE_SECONDS, self._request_timeout)
        self._acceptor = Acceptor(self._listener, self.places, self._protocol, tls=self._tls, handshake_seconds=seconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor.cut_off()
        self._listener.close()
        await super().shutdown(sockets)

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

    def _protocol(self, place: Place) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(
            self.config, self.server_state, self.lifespan.state, place=place, request_timeout=self._request_timeout
        )
