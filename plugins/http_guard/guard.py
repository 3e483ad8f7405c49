"""The guard: connections, heads and bodies in bounds, requests in turns, and no foreign web pages."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.http_front import HttpFront, HttpGuard
from pegboard.plugins.http_guard.bodies import BodyGuard
from pegboard.plugins.http_guard.connections import (
    HANDSHAKE_SECONDS,
    SPARE,
    Acceptor,
    Place,
    Places,
    no_connection_left,
)
from pegboard.plugins.http_guard.hosts import Hosts
from pegboard.plugins.http_guard.memory import bound_kept_memory
from pegboard.plugins.http_guard.options import GuardFields
from pegboard.plugins.http_guard.origins import Origins
from pegboard.plugins.http_guard.protocol import BoundedHttpProtocol
from pegboard.plugins.http_guard.turns import InTurns
from pegboard.toolkit.http.levels import NEEDED_LEVEL

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Scope

    from pegboard.core.interfaces.errors import InvalidRequest
    from pegboard.core.interfaces.options import Options

logger = logging.getLogger(__name__)

OTHER_FILES = 256
"""Open files that are no connections."""


class HttpGuardHooks:
    """Guards the server of the API process, as its config says."""

    def __init__(self, options: Options) -> None:
        self._bounds = options.section(GuardFields)
        self._host, self._origins = "", frozenset[str]()

    @hookimpl
    def configure(self, config: Any) -> None:
        self._host, self._origins = config.server.host, frozenset(config.server.cors.allow_origins)

    @hookimpl
    def guard_http(self, front: HttpFront) -> HttpGuard:
        bound_kept_memory()
        _allow_connections(self._bounds.max_connections)
        hosts = None if front.keyed else Hosts.of(self._host, self._bounds.allowed_hosts, front.listener)
        return Guard(self._bounds, Origins(self._origins, hosts, keyed=front.keyed))


class Guard(HttpGuard):
    """All bounds of one server."""

    def __init__(self, bounds: GuardFields, origins: Origins) -> None:
        self.places = Places(bounds.max_connections)
        self._request_timeout = bounds.request_timeout
        self._bodies = bounds.max_body_values, bounds.max_bodies_bytes
        self._origins = origins

    def refuse(self, scope: Scope) -> InvalidRequest | None:
        state = scope["state"]
        if SPARE in state and state[NEEDED_LEVEL] != "public":
            return no_connection_left()
        return self._origins.refusal(scope)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return InTurns(BodyGuard(app, *self._bodies))

    def accept(self, front: HttpFront, server: uvicorn.Server) -> Acceptor:
        def protocol(place: Place) -> asyncio.BaseProtocol:
            return BoundedHttpProtocol(
                server.config,
                server.server_state,
                server.lifespan.state,
                place=place,
                request_timeout=self._request_timeout,
            )

        seconds = min(HANDSHAKE_SECONDS, self._request_timeout)
        return Acceptor(front.listener, self.places, protocol, tls=front.tls, handshake_seconds=seconds)


def _allow_connections(most: int) -> None:
    """Every connection is an open file, and the usual soft limit, 1024, is there for programs older than this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning("server.max_connections is %d, but only %d files may be open (ulimit -Hn)", most, hard)
