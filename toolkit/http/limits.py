"""Limits of request bodies, by route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.toolkit.http.bodies import ANY_SIZE, MOST_BODY, MOST_TEXT, too_large
from pegboard.toolkit.http.routing import write_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pegboard.toolkit.http.route_table import Routes

PLAIN_BODY = 1024 * 1024
"""Most bytes of a body at a route that does not declare LARGE."""


class BodyLimit:
    """ASGI middleware: refuses larger request bodies with 413, by what they announce and by what arrives. `most` is for
    routes that declare LARGE, `text` the most bytes of one beside its strings in base64 (None: all of them). Those that
    declare STREAMED have no limit.
    """

    def __init__(self, app: ASGIApp, routes: Routes, most: int, text: int | None) -> None:
        self._app = app
        self._routes = routes
        self._most = most
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._routes.find(scope)
        most = self._most if route.large else min(PLAIN_BODY, self._most)
        if route.streamed:
            most = ANY_SIZE
        extensions = scope.setdefault("extensions", {})
        extensions[MOST_BODY], extensions[MOST_TEXT] = most, self._text
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if announced is not None and (not announced.isdigit() or int(announced) > most):
            await write_error(scope, too_large(most))(scope, receive, send)
            return
        await self._app(scope, _counted(receive, most) if announced is None else receive, send)


def _counted(receive: Receive, most: int) -> Receive:
    left = most

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise too_large(most)
        return message

    return counted
