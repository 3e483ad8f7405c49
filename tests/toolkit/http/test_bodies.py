"""What API plugins share: bodies, errors, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from pegboard.conformance.asgi import Exchange
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import MAX_ENTRIES, SMALL_BODY, RequestModel, validate_body, validate_part
from pegboard.toolkit.http.events import EventStream, event, until_disconnect
from pegboard.toolkit.http.openapi import body_docs, example_of
from pegboard.toolkit.http.routing import api_router


class Inner(RequestModel):
    number: int = 0


class Body(RequestModel):
    count: int = 1
    ratio: float = 1.0
    prompt: str | list[str] | list[int] = ""
    inner: Inner | None = None
    flag: bool = False


class Many(RequestModel):
    stop: str | list[str] = ""
    ids: list[int] | list[list[int]] = []
    bias: dict[str, float] = {}
    inner: list[Inner] = []
    anything: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", [1] * 50_000),
        ("ids", ["x"] * 50_000),
        ("ids", [["x"] * 50_000]),
        ("inner", [{"number": "x"}] * 50_000),
        ("inner", [5] * 50_000),
        ("bias", {str(i): "x" for i in range(50_000)}),
    ],
)
def test_wrong_entries_do_not_pile_up(field: str, value: Any) -> None:
    """A body of 16 MB may hold eight million; an error for each would take minutes and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        Many.model_validate_json(msgspec.json.encode({field: value}))
    assert caught.value.error_count() <= 4
    with pytest.raises(InvalidRequest, match=field):
        validate_body(msgspec.json.encode({field: value}), Many)


def test_what_is_right_may_be_long() -> None:
    whole = {
        "stop": ["x"] * 50_000,
        "ids": [[1] * 50_000],
        "inner": [{"number": 1}] * 50_000,
        "bias": {str(i): 0.5 for i in range(MAX_ENTRIES)},
        "anything": {str(i): "x" for i in range(50_000)},
    }
    body = validate_body(msgspec.json.encode(whole), Many)
    assert (len(body.stop), len(body.inner), len(body.bias), len(body.anything)) == (
        50_000,
        50_000,
        MAX_ENTRIES,
        50_000,
    )
    schema = Many.model_json_schema()["properties"]
    assert schema["bias"]["additionalProperties"] == {"type": "number"}
    assert schema["anything"]["type"] == "object"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_are_finite(number: bytes) -> None:
    with pytest.raises(InvalidRequest, match="ratio") as caught:
        validate_body(b'{"ratio": %s}' % number, Body)
    assert caught.value.param == "ratio"


def test_null_and_unknown_fields() -> None:
    body = validate_body(b'{"count": null, "future": {"x": [1]}, "ratio": 2}', Body)
    assert (body.count, body.ratio) == (1, 2.0)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[]", None),
        (b"3", None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"count": "1"}', "count"),
        (b'{"count": true}', "count"),
        (b'{"count": 1.5}', "count"),
        (b'{"flag": 1}', "flag"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"inner": {"number": "x"}}', "inner.number"),
        (b'{"inner": 5}', "inner"),
    ],
)
def test_wrong_bodies_are_named(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_body(data, Body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_whole_numbers_are_integers_however_they_are_written() -> None:
    body = validate_body(
        b'{"count": 2.0, "ratio": 3.0, "prompt": [1.0, 2, 3e2], "inner": {"number": -0.0}, "x": [0.5, "a"]}', Body
    )
    assert (body.count, body.ratio, body.prompt, body.inner) == (2, 3.0, [1, 2, 300], Inner(number=0))
    assert validate_part({"number": 4.0}, Inner, "inner").number == 4
    many = validate_body(b'{"anything": {"minimum": 2.5, "tall": 1e300}, "ids": [[1.0], [2]]}', Many)
    assert (many.ids, many.anything) == ([[1], [2]], {"minimum": 2.5, "tall": 1e300})
    # The second look is at what the first one was at, to the last number that other parsers do not take.
    odd = validate_body(b'{"ids": [[1.0]], "anything": {"a": [NaN, -Infinity, 1e999, %s]}}' % (b"9" * 400), Many)
    assert odd.ids == [[1]]
    assert repr(odd.anything["a"]) == f"[nan, -inf, inf, {'9' * 400}]"
    for number in (b"NaN", b"1e999"):
        with pytest.raises(InvalidRequest, match=r"ratio: Input should be a finite number"):
            validate_body(b'{"count": 2.0, "ratio": %s}' % number, Body)
    for wrong in (b"2.5", b"1e300", b'"2.0"', b"true"):
        with pytest.raises(InvalidRequest, match=r"count: Input should be a valid integer"):
            validate_body(b'{"inner": {"number": 1.0}, "count": %s}' % wrong, Body)


@pytest.mark.parametrize("text", [rb"\ud800", rb"\uDC00x", rb"a\ud800\u0041", rb"\ud83d"])
def test_half_a_character_is_named(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"half a character.* at line 1 column \d+") as caught:
        validate_body(b'{"prompt": "%s"}' % text, Body)
    assert caught.value.code == "malformed_json"
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        validate_body(rb'{"prompt": "\u12"}', Body)


def test_parts_are_named_with_their_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_part({"number": []}, Inner, "options")
    assert caught.value.param == "options.number"


def test_examples_and_schemas_of_routes() -> None:
    router = api_router()

    @router.post("/x", openapi_extra=body_docs(Body, {"count": 2}))
    async def x() -> None: ...

    @router.get("/y")
    async def y() -> None: ...

    first, second = (route for route in router.routes if isinstance(route, APIRoute))
    assert example_of(first) == {"count": 2}
    assert example_of(second) is None
    assert "$ref" not in str(first.openapi_extra)


def test_numbers_that_json_lacks_become_null() -> None:
    assert json_response([float("-inf"), float("nan")]).body == b"[null,null]"


def talk(handler: Any, *, leave_after: bytes | None = None) -> Exchange:
    """An exchange with an application that is one handler. The client leaves once it has read `leave_after`."""

    async def scene() -> Exchange:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            response: Response = await handler(Request(scope, receive))
            await response(scope, receive, send)

        exchange = Exchange(app, "POST", "/", b"{}")
        if leave_after is not None:
            await exchange.until(lambda one: leave_after in one.body)
            exchange.leave()
        return await exchange.end()

    return asyncio.run(scene())


class Source:
    """Events, and what became of them."""

    def __init__(self, *items: bytes | Exception, forever: bool = False) -> None:
        self.items, self.forever = items, forever
        self.closed = 0
        self.stopped = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
            if self.forever:
                await asyncio.Event().wait()
        finally:
            self.stopped = True

    async def close(self) -> None:
        self.closed += 1

    async def respond(self, request: Request) -> Response:
        await request.body()
        return EventStream(self.events(), close=self.close)


def test_streams_end_in_done() -> None:
    source = Source(event({"a": 1}))
    done = talk(source.respond)
    assert done.events() == ['{"a":1}', "[DONE]"]
    assert (source.closed, source.stopped, done.complete) == (1, True, True)
    assert done.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("error", "said"), [(InvalidRequest("broken", status=503), "broken"), (ValueError("a secret"), "internal error")]
)
def test_errors_in_a_stream_are_events(error: Exception, said: str) -> None:
    source = Source(event(1), error)
    done = talk(source.respond)
    assert msgspec.json.decode(done.events()[1])["error"]["message"] == said
    assert done.events()[-1] == "[DONE]"
    assert source.closed == 1


def test_a_streams_manners_are_its_apis() -> None:
    async def respond(request: Request) -> Response:
        await request.body()
        source = Source(event({"a": 1}, "news"), InvalidRequest("broken", status=503))
        return EventStream(
            source.events(),
            close=source.close,
            error=lambda error: event({"oops": error.message}, "error"),
            done=b"",
            headers={"request-id": "r1"},
        )

    done = talk(respond)
    assert done.body == b'event: news\ndata: {"a":1}\n\nevent: error\ndata: {"oops":"broken"}\n\n'
    assert done.complete
    assert done.headers["request-id"] == "r1"
    assert done.headers["cache-control"] == "no-cache"


def test_leaving_stops_the_events() -> None:
    source = Source(event(1), forever=True)
    talk(source.respond, leave_after=b"data: 1")
    assert (source.closed, source.stopped) == (1, True)


def test_until_disconnect_gives_the_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    async def handler(request: Request) -> Response:
        await request.body()
        return json_response(await until_disconnect(request, work()))

    assert talk(handler).json() == 5


def test_until_disconnect_raises_what_the_work_raises() -> None:
    async def work() -> int:
        raise InvalidRequest("no")

    async def handler(request: Request) -> Response:
        await request.body()
        with pytest.raises(InvalidRequest):
            await until_disconnect(request, work())
        return json_response("raised")

    assert talk(handler).json() == "raised"


def test_large_bodies_are_the_same() -> None:
    body = validate_body(b'{"prompt": "' + b"a" * SMALL_BODY + b'"}', Body)
    assert len(body.prompt) == SMALL_BODY
