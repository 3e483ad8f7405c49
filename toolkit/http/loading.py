"""Answers while the model loads: 503, in the shape of every other error. Probes that ask whether the process is alive
get 200: a supervisor that restarts what is not would never see the model loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from fastapi import Response

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.errors import answer_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PATIENCE = 5.0
"""Seconds that the rest of a body may take to arrive."""
ALIVE = frozenset({"/health", "/ping"})
"""Paths that ask for no more than whether the process is alive."""


class Entrance:
    """ASGI: the application, once it is set as `app`; until then, refusals."""

    def __init__(self) -> None:
        self.app: ASGIApp = _not_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    # To the end of the body: closing on unread bytes resets the connection, and the answer may be lost.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while (await receive()).get("more_body", False):
                pass
    if scope["path"] in ALIVE and scope["method"] in ("GET", "HEAD"):
        response = Response()
    else:
        message = "the model is still loading, try again in a moment"
        response = answer_error(InvalidRequest(message, status=503, code="not_ready"))
    response.headers["connection"] = "close"
    await response(scope, receive, send)
