"""Tells ASGI middleware with which status a request was answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.toolkit.http.errors import CLIENT_CLOSED_REQUEST

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def watched(app: ASGIApp, scope: Scope, receive: Receive, send: Send, done: Callable[[int], None]) -> None:
    """Let `app` answer, then call `done` with the status, however it ended: 499 if the client left, 500 without one."""
    status = 500

    async def noting(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, noting)
    except asyncio.CancelledError:
        status = CLIENT_CLOSED_REQUEST
        raise
    finally:
        done(status)
