"""The outermost layer of a server: gives a request an id, finds its route, checks guards and keys, and logs it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.asker import ASKER
from pegboard.toolkit.http.errors import CLIENT_CLOSED_REQUEST
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import ASKED_BY, NEEDED_LEVEL
from pegboard.toolkit.http.route_table import UNKNOWN, Entry, Routes
from pegboard.toolkit.http.routing import write_error

if TYPE_CHECKING:
    from fastapi import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_WANTED = frozenset({b"authorization", b"x-api-key", REQUEST_ID})
_LONGEST_PATH = 200


class Front:
    """ASGI middleware around the limits and the routes.

    Every answer carries an `x-request-id`: the client's, if it is a plain word, or a new one, which routes find as
    ``request.state.request_id``. What a guard refuses (`refusals`, see `HttpGuard.refuse`), or has no key where one is
    needed, is answered in the error format of the API that the path belongs to, before anything of its body is read. An
    exception without an answer becomes a 500 here, so that it has these headers too; it is raised again, for the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Routes,
        keys: Keys,
        *,
        refusals: Sequence[Callable[[Scope], InvalidRequest | None]] = (),
        log: bool = False,
    ) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._refusals = tuple(refusals)
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The server speaks no other protocol; should a plugin bring one, no key would be asked for.
            if scope["type"] == "lifespan" or not self._keys:
                await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        entry = self._routes.find(scope)
        headers = {name: value for name, value in scope["headers"] if name in _WANTED}
        named = (REQUEST_ID, self._identify(entry, scope, headers).encode())
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], named]
            await send(message)

        try:
            error = self._refusal(entry, scope, headers)
            if error is None:
                await self._app(scope, receive, sending)
            else:
                await _refused(scope, error)(scope, receive, sending)
        except asyncio.CancelledError:
            status = status or CLIENT_CLOSED_REQUEST
            raise
        except InvalidRequest as refusal:
            if status:
                raise
            await write_error(scope, refusal)(scope, receive, sending)
        except Exception:
            if not status:
                await write_error(scope, internal_error())(scope, receive, sending)
            raise
        finally:
            if self._log:
                _log(scope, entry, status or CLIENT_CLOSED_REQUEST, time.perf_counter() - began)

    def _identify(self, entry: Entry, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Note the request's id, the name of its key and what its route needs; return the id."""
        state = scope.setdefault("state", {})
        state[NEEDED_LEVEL] = entry.level
        state["request_id"] = _request_id(headers.get(REQUEST_ID))
        state[ASKED_BY] = self._keys.asker(headers)
        ASKER.set(state[ASKED_BY])
        return str(state["request_id"])

    def _refusal(self, entry: Entry, scope: Scope, headers: dict[bytes, bytes]) -> InvalidRequest | None:
        for refuse in self._refusals:
            if (error := refuse(scope)) is not None:
                return error
        refused = self._keys.refusal(entry.level, headers)
        if refused is not None and refused.status == 403 and entry is UNKNOWN:
            # Any key learns that it is not there; the application is not asked.
            return not_found(scope)
        return refused


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
