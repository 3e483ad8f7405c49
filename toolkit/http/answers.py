"""Answers of routes: JSON, whole or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

LARGE_ANSWER = 256 * 1024
"""Bytes from which on an answer is sent in pieces."""
_PIECE = 64 * 1024


class _LargeResponse(Response):
    """A body that is sent in pieces, as fast as the client takes them: one that reads slowly keeps the server waiting,
    and not a copy of the body in the connection's buffer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for at in range(0, len(body), _PIECE):
            more = at + _PIECE < len(body)
            await send({"type": "http.response.body", "body": bytes(body[at : at + _PIECE]), "more_body": more})


def json_response(data: Any, status: int = 200) -> Response:
    """Answer with `data` as JSON. Numbers that JSON does not know (a log-probability of minus infinity) become null."""
    body = msgspec.json.encode(data)
    kind = _LargeResponse if len(body) > LARGE_ANSWER else Response
    return kind(body, status_code=status, media_type="application/json")


async def built_response(build: Callable[[], object], *, large: bool) -> Response:
    """`json_response` of what `build` returns. With `large` it is built in a thread, so that the event loop goes on."""
    if large:
        return await asyncio.to_thread(lambda: json_response(build()))
    return json_response(build())
