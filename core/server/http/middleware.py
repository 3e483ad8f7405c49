"""The first to see a request: names it, finds its route, checks its key, and writes its line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import quote

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.server.asker import ASKER
from pegboard.core.server.http.hosts import Hosts, is_own_origin
from pegboard.core.server.http.keys import Keys
from pegboard.core.server.http.routes import UNKNOWN, Entry, Routes
from pegboard.core.server.http.turns import Turns
from pegboard.toolkit.http.errors import CLIENT_CLOSED_REQUEST, answer_error
from pegboard.toolkit.http.levels import ASKED_BY
from pegboard.toolkit.http.routing import ErrorFormats

if TYPE_CHECKING:
    from fastapi import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
SPARE = "pegboard.spare"
"""In a scope's state: the request came in a spare place, which is for health probes."""
_WANTED = frozenset({b"authorization", b"x-api-key", REQUEST_ID, b"host", b"origin", b"sec-fetch-site"})
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST_PATH = 200


class Front:
    """ASGI middleware around the limits and the routes.

    Every answer carries an `x-request-id`: the client's, if it is a plain word, or a new one, which routes find as
    ``request.state.request_id``. What has no key where one is needed is refused, in the error format of the API that
    the path belongs to, before anything of its body is read; so is what a web page of elsewhere may have sent, and,
    where all places are taken, what is not public. An exception without an answer becomes a 500 here, so
    that it has these headers too; it is raised again, for the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Routes,
        keys: Keys,
        *,
        hosts: Hosts | None = None,
        origins: Collection[str] = (),
        log: bool = False,
    ) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._log = log
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The server speaks no other protocol; should a plugin bring one, no key would be asked for.
            if scope["type"] == "lifespan" or not self._keys:
                await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        entry = self._routes.find(scope)
        headers = {name: value for name, value in scope["headers"] if name in _WANTED}
        named = (REQUEST_ID, self._identify(scope, headers).encode())
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], named]
            await send(message)

        try:
            error = _no_place(entry, scope) or self._refusal(entry, scope, headers)
            if error is None and entry.level != "public":
                await self._turns.begin()
            if error is None:
                await self._app(scope, receive, sending)
            else:
                await _refused(scope, error)(scope, receive, sending)
        except asyncio.CancelledError:
            status = status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            if not status:
                await write_error(scope, internal_error())(scope, receive, sending)
            raise
        finally:
            if self._log:
                _log(scope, entry, status or CLIENT_CLOSED_REQUEST, time.perf_counter() - began)

    def _identify(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Note the request's id and the name of its key; return the id."""
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers.get(REQUEST_ID))
        state[ASKED_BY] = self._keys.asker(headers)
        ASKER.set(state[ASKED_BY])
        return str(state["request_id"])

    def _refusal(self, entry: Entry, scope: Scope, headers: dict[bytes, bytes]) -> InvalidRequest | None:
        if not self._keys and self._hosts is not None and (error := self._hosts.refusal(headers.get(b"host"))):
            return error
        if self._is_foreign(scope["method"], headers) and not self._is_named(headers.get(b"origin", b"")):
            return InvalidRequest(
                "pages of other origins may not use this server, unless server.cors.allow_origins names them",
                status=403,
                code="cross_site",
            )
        refused = self._keys.refusal(entry.level, headers)
        if refused is not None and refused.status == 403 and entry is UNKNOWN:
            # Any key learns that it is not there; the application is not asked.
            return not_found(scope)
        return refused

    def _is_foreign(self, method: str, headers: dict[bytes, bytes]) -> bool:
        """Return whether a page of another origin sent this: browsers let any page send some requests, and only keep
        the answer from it. They say so in Sec-Fetch-Site, but not to other machines without TLS, and older browsers
        never do; there the Origin must tell. With keys it need not: such a page knows none.
        """
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None:
            return site == b"cross-site" and method not in _HARMLESS
        if origin is None or self._keys or method == "OPTIONS":
            return False
        return not is_own_origin(origin, headers.get(b"host"))

    def _is_named(self, origin: bytes) -> bool:
        return "*" in self._origins or origin.decode("latin-1") in self._origins


def _no_place(entry: Entry, scope: Scope) -> InvalidRequest | None:
    if entry.level == "public" or SPARE not in scope["state"]:
        return None
    return no_connection_left()


def no_connection_left() -> InvalidRequest:
    """Return the refusal of what came in a spare place and is not a health probe, or stays too long."""
    return InvalidRequest("the server has no connection left, try again later", status=503, code="busy")


def write_error(scope: Scope, error: InvalidRequest) -> Response:
    """Return the answer to an error, in the format of the API to which the request's path belongs."""
    formats: ErrorFormats = scope["app"].state.errors
    return answer_error(error, formats.at(scope["path"]))


def not_found(scope: Scope) -> InvalidRequest:
    """Return the answer to a path that no route has."""
    message = f"there is no {scope['method']} {scope['path']}; /openapi.json lists all routes"
    return InvalidRequest(message, status=404, code="not_found")


def internal_error() -> InvalidRequest:
    """Return what a client learns of a bug."""
    return InvalidRequest("internal error", status=500, code="internal_error")


def _refused(scope: Scope, error: InvalidRequest) -> Response:
    response = write_error(scope, error)
    if error.status == 401:
        problem = ', error="invalid_token"' if error.code == "invalid_api_key" else ""
        response.headers["www-authenticate"] = f'Bearer realm="pegboard"{problem}'
    return response


def _request_id(given: bytes | None) -> str:
    return given.decode() if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex


def _log(scope: Scope, entry: Entry, status: int, seconds: float) -> None:
    # Quoted, because a path may hold line ends and whatever else a log should not.
    path = quote(scope["path"][:_LONGEST_PATH], safe="/:@")
    client = scope.get("client")
    where = f"{client[0]}:{client[1]}" if client else "unknown"
    rid = scope["state"]["request_id"]
    fields = {
        "method": scope["method"],
        "path": path,
        "route": entry.template,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "request_id": rid,
        "client": where,
    }
    line = "%s %s %d in %.1f ms (request %s from %s)"
    logger.info(line, scope["method"], path, status, seconds * 1000, rid, where, extra=fields)
