"""Server-sent events, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.errors import ClientDisconnected, error_body

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result. When the client leaves first, `work` is cancelled and ClientDisconnected raised.

    Read the body before calling this: it takes over the connection's incoming messages.
    """
    task = asyncio.ensure_future(work)
    await race(task, disconnect(request.receive))
    if task.cancelled():
        raise ClientDisconnected
    try:
        return task.result()
    finally:
        # Its exception knows this frame and all above, and so would keep itself and a whole request alive.
        del task


async def race(main: asyncio.Future[Any], other: Coroutine[Any, Any, None]) -> None:
    """Wait for either; afterwards both have ended, the slower one by cancellation."""
    watcher = asyncio.ensure_future(other)
    try:
        await asyncio.wait({main, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (main, watcher):
            task.cancel()
        await asyncio.wait({main, watcher})
        if not watcher.cancelled():
            watcher.exception()


DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """Return one server-sent event with JSON data, and a name where the API gives its events names."""
    head = f"event: {name}\ndata: " if name else "data: "
    return head.encode() + msgspec.json.encode(data) + b"\n\n"


def error_event(error: InvalidRequest) -> bytes:
    """Return an error in the middle of a stream, in the format that most share."""
    return event(error_body(error.message, status=error.status, param=error.param, code=error.code))


class EventStream(Response):
    """Sends events as they come, then `done`. Make it only once the request has been accepted.

    An error in the middle becomes what `error` makes of it, before the end. When the client leaves, `events` is closed
    at once. `close` runs in every case, once: abort there what has not finished.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        error: Callable[[InvalidRequest], bytes] = error_event,
        done: bytes = DONE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._error = error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            await race(sending, disconnect(receive))
        finally:
            await self._close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._guarded()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._events) as frames:
                async for frame in frames:
                    yield frame
        except Exception as error:
            yield self._failed(error)

    def _failed(self, error: Exception) -> bytes:
        """Return the event of an exception on the way."""
        if isinstance(error, InvalidRequest):
            return self._error(error)
        logger.error("a stream failed", exc_info=error)
        return self._error(InvalidRequest("internal error", status=500, code="internal_error"))
