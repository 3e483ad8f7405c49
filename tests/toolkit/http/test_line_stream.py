"""Streams of lines: NDJSON with the manners of an EventStream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.answer_stream import AnswerWriter
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.line_stream import AnswerLines, LineStream, kept_alive, line, line_answer

ODD = 'a "quote", a \\, {braces},\n\r\n\u2028 lines \u0000 and 😀'


class Source:
    """Lines, and then silence, an error or the end; counts what becomes of them."""

    def __init__(self, *items: bytes | Exception, forever: bool = False) -> None:
        self.items, self.forever = items, forever
        self.taken = self.closed = 0
        self.stopped = False

    async def lines(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self.items:
                self.taken += 1
                if isinstance(item, Exception):
                    raise item
                yield item
            if self.forever:
                await asyncio.Event().wait()
        finally:
            self.stopped = True

    async def close(self) -> None:
        self.closed += 1

    def app(self, **manners: Any) -> FastAPI:
        async def respond(request: Request) -> Response:
            await request.body()
            return LineStream(self.lines(), close=self.close, **manners)

        app = FastAPI()
        app.post("/")(respond)
        return app


def test_lines_hold_anything() -> None:
    source = Source(line({"a": ODD}), line({"done": True}))
    done = asyncio.run(call(source.app(), "POST", "/"))
    assert done.headers["content-type"] == "application/x-ndjson"
    assert done.headers["x-accel-buffering"] == "no"
    *lines, rest = done.body.split(b"\n")
    assert [json.loads(one) for one in lines] == [{"a": ODD}, {"done": True}]
    assert (rest, done.complete, source.closed) == (b"", True, 1)


@pytest.mark.parametrize(
    ("error", "said"), [(InvalidRequest("broken", status=503), "broken"), (ValueError("a secret"), "internal error")]
)
def test_an_error_is_the_last_line(error: Exception, said: str) -> None:
    source = Source(line(1), error)
    done = asyncio.run(call(source.app(), "POST", "/"))
    assert json.loads(done.body.splitlines()[-1])["error"]["message"] == said
    own = asyncio.run(call(Source(line(1), error).app(error=lambda one: line({"oops": one.message})), "POST", "/"))
    assert own.body == line(1) + line({"oops": said})


def test_leaving_stops_the_lines() -> None:
    async def scene(**manners: Any) -> Source:
        source = Source(line(1), forever=True)
        exchange = Exchange(source.app(**manners), "POST", "/")
        await exchange.until(lambda one: b"1\n" in one.body)
        exchange.leave()
        await exchange.end()
        return source

    for manners in ({}, {"keep_alive": 30.0}):
        source = asyncio.run(scene(**manners))
        assert (source.closed, source.stopped) == (1, True)


def test_a_slow_reader_holds_the_lines_back() -> None:
    async def scene() -> tuple[int, int]:
        source = Source(*[line(number) for number in range(50)])
        reads, stuck = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            if b"3\n" in message.get("body", b""):
                stuck.set()
                await reads.wait()

        never = asyncio.Event()

        async def receive() -> Any:
            await never.wait()

        response = LineStream(source.lines(), close=source.close)
        sending = asyncio.ensure_future(response({"type": "http"}, receive, send))
        await stuck.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        held = source.taken
        reads.set()
        await sending
        return held, source.taken

    assert asyncio.run(scene()) == (4, 50)


def test_silence_is_filled_where_it_is_wanted() -> None:
    async def scene() -> list[bytes]:
        go = asyncio.Event()

        async def frames() -> AsyncGenerator[bytes, None]:
            yield b"first"
            yield b""
            await go.wait()
            yield b"last"

        found: list[bytes] = []
        async for frame in kept_alive(frames(), 0.001, b"?"):
            found.append(frame)
            if found.count(b"?") == 3:
                go.set()
        return found

    found = asyncio.run(scene())
    assert [one for one in found if one != b"?"] == [b"first", b"", b"last"]
    assert found.count(b"?") >= 3
    assert found[-1] == b"last"


def test_answers_as_lines() -> None:
    class Words(AnswerWriter):
        def more(self, index: int, chunk: OutputChunk) -> bytes:
            return line([index, chunk.text])

    async def respond(request: Request) -> Response:
        await request.body()
        client = FakeEngineClient(fail_at=2)
        return AnswerLines(await Answers.submit(client, [GenerateRequest(prompt="x", stream=True)]), Words())

    app = FastAPI()
    app.post("/")(respond)
    done = asyncio.run(call(app, "POST", "/"))
    assert done.headers["content-type"] == "application/x-ndjson"
    *words, error = [json.loads(one) for one in done.body.splitlines()]
    assert words == [[0, SCRIPT[0]], [0, SCRIPT[1]]]
    assert error["error"]["type"] == "server_error"


def test_documents_tell_of_lines() -> None:
    content = line_answer({"type": "object"}, lines="One piece each.")[200]["content"]
    assert content["application/x-ndjson"]["schema"]["description"] == "One piece each."
