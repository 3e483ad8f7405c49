"""For APIs that stream lines of JSON (NDJSON) instead of events, with the same guarantees.

::

    async def lines(answers: Answers) -> AsyncGenerator[bytes, None]:
        async for _, chunk in answers.chunks():
            yield line({"piece": chunk.text})
        yield line({"done": True})

    return LineStream(lines(answers), close=answers.aclose, error=lambda error: line({"error": error.message}))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.answer_stream import AnswerStream, AnswerWriter
from pegboard.toolkit.http.errors import error_body
from pegboard.toolkit.http.events import EventStream
from pegboard.toolkit.http.openapi import json_answer

if TYPE_CHECKING:
    from pegboard.toolkit.http.generation import Answers

NDJSON = "application/x-ndjson"

BLANK_LINE = b"\n"
"""What keeps a connection of lines alive: readers of NDJSON pass over an empty line."""

COMMENT = b":\n\n"
"""The same for server-sent events: a comment."""


def line(data: object) -> bytes:
    """Return one line with JSON data. What would end a line stands escaped in JSON's strings."""
    return msgspec.json.encode(data) + b"\n"


def error_line(error: InvalidRequest) -> bytes:
    """Return an error in the middle of a stream, in the format that most share."""
    return line(error_body(error.message, status=error.status, param=error.param, code=error.code))


class LineStream(EventStream):
    """Sends lines as they come, each at once. Make it only once the request has been accepted.

    An error in the middle becomes what `error` makes of it: the last line. When the client leaves, `lines` is closed at
    once; while it reads slowly, nothing more is taken from `lines`. `close` runs in every case, once: abort there what
    has not finished. With `keep_alive`, an empty line is sent after so many seconds without another one; by default
    none is, since some clients read every line as JSON.
    """

    media_type = NDJSON

    def __init__(
        self,
        lines: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        error: Callable[[InvalidRequest], bytes] = error_line,
        done: bytes = b"",
        headers: Mapping[str, str] | None = None,
        keep_alive: float | None = None,
    ) -> None:
        if keep_alive is not None:
            lines = kept_alive(lines, keep_alive, BLANK_LINE)
        super().__init__(lines, close=close, error=error, done=done, headers=headers)


class AnswerLines(AnswerStream):
    """An AnswerStream of lines: the shortest way from the engine to the connection. The writer gives whole lines."""

    media_type = NDJSON

    def __init__(
        self,
        answers: Answers,
        writer: AnswerWriter,
        *,
        close: Callable[[], Awaitable[None]] | None = None,
        error: Callable[[InvalidRequest], bytes] = error_line,
        done: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(answers, writer, close=close, error=error, done=done, headers=headers)


async def kept_alive(
    frames: AsyncGenerator[bytes, None], seconds: float, frame: bytes = COMMENT
) -> AsyncGenerator[bytes, None]:
    """`frames`, with `frame` whenever so many seconds have passed without one."""
    async with contextlib.aclosing(frames):
        while True:
            coming = asyncio.ensure_future(_next(frames))
            try:
                while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                    yield frame
                found = coming.result()
            finally:
                coming.cancel()
                await asyncio.wait({coming})
            if found is None:
                return
            yield found


async def _next(frames: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(frames, None)


def line_answer(
    schema: type[BaseModel] | Mapping[str, Any], description: str = "The answer.", *, lines: str
) -> dict[int | str, Any]:
    """`http.json_answer` of a route that can stream lines instead, which `lines` describes."""
    found = json_answer(schema, description)
    found[200]["content"][NDJSON] = {"schema": {"description": lines}}
    return found
