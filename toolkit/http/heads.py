"""HEAD on every route with GET: the same answer without its body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Match

from pegboard.toolkit.http.route_table import flat

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FOUND = ("route", "endpoint", "path_params")
"""What routing leaves in a scope, for middleware that looks there afterwards."""


class Heads:
    """ASGI middleware right around the routes: has a GET route answer HEAD, unless another route takes that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or _is_taken(scope):
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        try:
            await self._app(asked, receive, without_body)
        finally:
            scope.update({name: asked[name] for name in _FOUND if name in asked})


def _is_taken(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in flat(scope["app"].router.routes))
