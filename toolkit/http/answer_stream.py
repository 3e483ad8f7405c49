"""For API plugins: answers as server-sent events, with as little as possible between the engine and the connection.

A writer says what each chunk of an answer is in the stream; the rest is here::

    class Words(AnswerWriter):
        def more(self, index: int, chunk: OutputChunk) -> bytes:
            return event({"text": chunk.text})

    return AnswerStream(await Answers.submit(client, requests), Words())
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.events import DONE, EventStream, disconnect, error_event, race

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pegboard.core.interfaces.client import OutputChunk
    from pegboard.toolkit.http.generation import Answers

BODY_WRITER = "pegboard.body"
"""The ASGI extension in which the server offers a BodyWriter."""


class BodyWriter(Protocol):
    """Where pieces of a body may go that need not wait for anything, once ``http.response.start`` has been sent: to the
    connection itself, past whatever coroutines would pass them on. The last piece goes the usual way.
    """

    @property
    def gone(self) -> bool:
        """Whether the client has left, so that there is nothing to write any more."""
        ...

    def write(self, data: bytes) -> bool:
        """Send a piece; nothing happens where the client has gone. False where the connection takes no more for now:
        what is written all the same is kept, so `drain` first.
        """
        ...

    async def drain(self) -> None:
        """Wait until the connection takes more, or is gone."""
        ...


def body_writer(scope: Scope) -> BodyWriter | None:
    """Return the server's BodyWriter, for routes that write in many small pieces; None where there is none, or where
    a middleware stands between that wants to see the body. A middleware that does not has the attribute
    `passes_bodies`, which is True.
    """
    app: Any = scope.get("app")
    own = getattr(getattr(app, "state", None), "own_middleware", None)
    if own is None:
        return None
    for middleware in app.user_middleware:
        if middleware not in own and not getattr(middleware.cls, "passes_bodies", False):
            return None
    writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
    return writer


class AnswerWriter(abc.ABC):
    """Writes the events of one stream. Each method gives complete events, or b"" for none."""

    def begin(self) -> bytes:
        """Return what comes before any output."""
        return b""

    @abc.abstractmethod
    def more(self, index: int, chunk: OutputChunk) -> bytes:
        """Return what a chunk of the answer of this index brings; ``answers.answers[index]`` has it already."""

    def end(self) -> bytes:
        """Return what comes when all answers have ended well."""
        return b""


class AnswerStream(EventStream):
    """An EventStream of answers. Whatever becomes of it, what has not finished then is aborted; `close` runs in
    place of ``answers.aclose``, and calls it.

    Where the engine's client and the server allow it, outputs are written to the connection as they come: one piece for
    all that came at one time, and no task wakes up for it. A client that does not keep up gets fewer, larger chunks.
    """

    def __init__(
        self,
        answers: Answers,
        writer: AnswerWriter,
        *,
        close: Callable[[], Awaitable[None]] | None = None,
        error: Callable[[InvalidRequest], bytes] = error_event,
        done: bytes = DONE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(self._frames(), close=close or answers.aclose, error=error, done=done, headers=headers)
        self._answers = answers
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = body_writer(scope) if self._answers.live else None
        if body is None:
            await super().__call__(scope, receive, send)
            return
        direct = _Direct(self._answers, self._writer, body, self._failed)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            direct.start()
            await race(direct.last, disconnect(receive))
            if not direct.last.cancelled():
                last = direct.last.result() + self._done
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            direct.stop()
            await self._close()

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        if first := self._writer.begin():
            yield first
        async for index, chunk in self._answers.chunks():
            if frames := self._writer.more(index, chunk):
                yield frames
        if last := self._writer.end():
            yield last


class _Direct:
    """Writes what comes when it comes: the engine's client calls it. `last` are the events that end the stream."""

    def __init__(
        self, answers: Answers, writer: AnswerWriter, body: BodyWriter, failed: Callable[[Exception], bytes]
    ) -> None:
        self.last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers = answers
        self._writer = writer
        self._body = body
        self._failed = failed
        self._first = True
        self._draining: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._answers.watch(self._wake)
        self._wake()

    def stop(self) -> None:
        """Write nothing more."""
        self.last.cancel()
        if self._draining is not None:
            self._draining.cancel()

    def _wake(self) -> None:
        if self._draining is not None or self.last.done() or self._body.gone:
            return
        frames: list[bytes] = []
        try:
            over = self._add_news(frames)
            data = b"".join(frames)
            if over:
                self.last.set_result(data)
            elif data and not self._body.write(data):
                self._draining = asyncio.ensure_future(self._drain())
        except Exception as error:
            # Only the request's own task may see it.
            self.last.set_exception(error)

    def _add_news(self, frames: list[bytes]) -> bool:
        """Add the events of what is there; whether the stream is at its end."""
        try:
            if self._first:
                self._first = False
                frames.append(self._writer.begin())
            for index, chunk in self._answers.take():
                frames.append(self._writer.more(index, chunk))
            if self._answers.over:
                frames.append(self._writer.end())
                return True
        except Exception as error:
            frames.append(self._failed(error))
            return True
        return False

    async def _drain(self) -> None:
        await self._body.drain()
        self._draining = None
        self._wake()
