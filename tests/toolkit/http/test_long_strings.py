"""Long strings of bodies, which no parser reads: what comes back is what a parser makes of the whole."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from typing import Any

import pytest
from pydantic_core import from_json

from pegboard.conformance.asgi import Exchange
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http import bodies
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.long_strings import LONG, LongStrings
from tests.faults.whole_api import whole_app

PIECE = 64 * 1024


def parsed(data: bytes) -> tuple[Any, bytes]:
    """A body's value, and what a parser had of it."""
    found = LongStrings.taken_out(data)
    return found.put_back(from_json(found.rest)), found.rest


PLAIN = base64.b64encode(random.Random(1).randbytes(3 * PIECE))
LINES = re.sub(rb"(.{76})", rb"\1\\n", PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        b"data:image/png;base64," + PLAIN,
        rb"data:image\/svg\u002Bxml;base64," + PLAIN.replace(b"/", rb"\/"),
        PLAIN.replace(b"+", rb"\u002B") + rb"\u003d\u003d",
        b"DATA:," + LINES,
        LINES.replace(rb"\n", rb"\r\n"),
        rb"\/" * PIECE,
        rb"a\/b\n" * PIECE,
        rb"A\u002b" * PIECE,
        rb"AB\n" * (LONG // 3),
        b"%2B" * LONG,
    ],
)
def test_base64_is_never_parsed_however_it_is_written(text: bytes) -> None:
    """PHP escapes slashes, .NET plus signs and Gson equals signs; some encoders break lines."""
    data = b'{"model":"m", "a" : [{"url":"' + text + b'"}, "x", 5, "short"], "b":"' + text + b'"\n}'
    value, rest = parsed(data)
    assert value == json.loads(data)
    assert len(rest) < 3500


@pytest.mark.parametrize(
    "text",
    [
        b"plain words " * LONG,
        rb"\\n" * LONG,
        rb"a\"" * LONG,
        rb"\u0041" * LONG,
        rb"\u0000" * LONG,
        "é".encode() * LONG,
        b"data:text/plain,plain words " * LONG,
        PLAIN + rb"\\",
        PLAIN + rb"\"",
        rb"say: \"" + PLAIN + rb"\" or not",
        b"data:;base64," + PLAIN + b" what is this?",
    ],
)
def test_what_is_not_base64_stays_where_it_is(text: bytes) -> None:
    data = b'{"a":"' + text + b'"}'
    value, rest = parsed(data)
    assert value == json.loads(data)
    assert rest == data


def test_names_and_what_stands_between_strings_stay() -> None:
    """A list of many numbers is as free of quotes as base64 is."""
    text, numbers = PLAIN, b"1," * LONG + b"1"
    data = b'{"' + text + b'" \n : [' + numbers + b'],"b":' + b" " * LONG + b'"c", "d":[' + numbers + b"]}"
    value, rest = parsed(data)
    assert value == json.loads(data)
    assert rest == data
    for odd in (b"[" + numbers + b"]", numbers, text, b'"' + text, b'{"a":"' + text, text + b'"}', b""):
        assert LongStrings.taken_out(odd).rest == odd


def test_it_is_what_a_parser_makes_of_whatever_comes() -> None:
    rng = random.Random(7)
    units = [PLAIN[:LONG], PLAIN[: 3 * LONG], b"data:image/png;base64," + PLAIN[:9000], rb"\/" * LONG, rb"\n" * 5000]
    units += [b"x", b"", rb"\"", rb"\\", b"a b", b"1,2,3", b"data:", "漢字".encode()]

    def value(depth: int) -> bytes:
        kind = rng.randrange(6 if depth else 4)
        if kind < 3:
            return b'"' + b"".join(rng.choice(units) for _ in range(rng.choice((1, 1, 1, 2, 3)))) + b'"'
        if kind == 3:
            return rng.choice((b"1", b"-2.5", b"null", b"[" + b"7," * 3000 + b"7]"))
        parts = [value(depth - 1) for _ in range(rng.randrange(5))]
        if kind == 4:
            return b"[" + rng.choice((b",", b" ,\n")).join(parts) + b"]"
        return b"{" + b",".join(b'"%d" : %s' % (i, one) for i, one in enumerate(parts)) + b"}"

    taken = 0
    for _ in range(150):
        data = value(4)
        found, rest = parsed(data)
        assert found == json.loads(data)
        taken += rest != data
    assert taken > 30


class Inner(RequestModel):
    url: str = ""
    parts: list[Any] = []


class Body(RequestModel):
    count: int = 1
    inner: Inner | None = None
    many: list[Inner] = []
    anything: dict[str, Any] = {}
    ids: list[int] = []


TEXT = PLAIN.decode()


def large(body: dict[str, Any], most: int | None = None) -> Body:
    return bodies.validate_large(bytearray(json.dumps(body).encode()), Body, most)


def test_models_get_them_wherever_they_stand() -> None:
    """Also where numbers are written with a point, and a second parse has no long string at all."""
    url = f"data:;base64,{TEXT}"
    said: dict[str, Any] = {
        "inner": {"url": url, "parts": [{"a": [url, TEXT]}, TEXT, 'data: some\n"words" ' * LONG, "漢\0" * LONG]},
        "many": [{"url": TEXT}, {"url": "short"}],
        "anything": {"deep": [[{"url": url}]], "n": None},
        "ids": [1, 2],
    }
    for count in (2, 2.0):
        body = large({**said, "count": count})
        assert body.count == 2
        assert body.inner is not None
        assert (body.inner.url, body.inner.parts) == (url, said["inner"]["parts"])
        assert [one.url for one in body.many] == [TEXT, "short"]
        assert body.anything == said["anything"]


def test_errors_name_the_place_in_the_whole_body() -> None:
    data = b'{"a":"' + PLAIN + b'",\n "b":"' + PLAIN + b'", "c": ["' + PLAIN + b'", x]}'
    with pytest.raises(InvalidRequest) as whole:
        bodies.validate_body(data, Body)
    with pytest.raises(InvalidRequest) as rest:
        bodies.validate_large(bytearray(data), Body, None)
    assert rest.value.message == whole.value.message
    assert "line 2 column" in rest.value.message
    with pytest.raises(InvalidRequest, match=r"inner\.url: Input should be a valid string") as caught:
        large({"inner": {"url": 5}, "x": TEXT})
    assert caught.value.param == "inner.url"


def test_what_a_parser_reads_is_bounded() -> None:
    """Before, a server with media had 64 MiB of escapes parsed at once, and nothing else ran meanwhile."""
    assert large({"anything": {"a": TEXT}}, most=1000).anything == {"a": TEXT}
    for text in ("\0" * PIECE, "word " * PIECE, "é" * PIECE):
        with pytest.raises(InvalidRequest, match=r"server\.max_body_bytes") as caught:
            large({"anything": {"a": text}}, most=PIECE)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/generate"])
def test_servers_bound_it(path: str) -> None:
    async def scene(text: str) -> Exchange:
        app = whole_app(FakeEngineClient(media=fake_processor()), max_body_bytes=PIECE)
        body = {"messages": [{"role": "user", "content": "hi", "x": text}], "text": "hi", "x": text, "max_tokens": 1}
        return await Exchange(app, "POST", path, json.dumps(body).encode()).end()

    assert asyncio.run(scene(TEXT[: 3 * PIECE])).status == 200
    answer = asyncio.run(scene("\n " * PIECE))
    assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
