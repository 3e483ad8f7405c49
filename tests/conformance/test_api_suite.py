"""The suite of ApiRouter reads what APIs stream, whatever the format, and says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response

from pegboard.conformance.api_router import ApiRouterContract
from pegboard.conformance.api_router.sampling import parameters_of
from pegboard.conformance.api_router.texts import Event, Unreadable, all_texts, pieces_of, read_events, wrong_with
from pegboard.conformance.asgi import Exchange
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import event
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.levels import USER
from pegboard.toolkit.http.line_stream import BLANK_LINE, COMMENT, LineStream, line
from pegboard.toolkit.http.openapi import body_docs
from pegboard.toolkit.http.routing import api_router
from tests.mutants.small_api import EXAMPLE, SmallApi, SmallLines, TextBody

TEXT = "".join(pieces_of(3))


def sent(kind: str, *frames: bytes) -> str:
    """What is wrong with the text of these frames; "" where nothing is."""
    return wrong_with(all_texts(read_events(kind, b"".join(frames))), 3)


def growing() -> list[str]:
    return ["".join(pieces_of(3)[: end + 1]) for end in range(len(pieces_of(3)))]


SSE, NDJSON = "text/event-stream; charset=utf-8", "application/x-ndjson"


def test_right_texts_in_many_forms() -> None:
    pieces = pieces_of(3)
    assert sent(SSE, *[event({"text": one}) for one in pieces], b"data: [DONE]\n\n") == ""
    assert sent(SSE, COMMENT, *[event({"text": one}, "news") for one in growing()], COMMENT) == ""
    assert sent(SSE, *[event({"text": one}) for one in pieces], event({"type": "end", "text": TEXT})) == ""
    assert sent(NDJSON, *[line({"a": [{"b": one}]}) for one in pieces], BLANK_LINE, line({"whole": TEXT})) == ""
    assert sent("application/json-seq", *[b"\x1e" + line(one) for one in pieces]) == ""
    assert sent("application/json", json.dumps([{"text": one} for one in pieces]).encode()) == ""
    assert sent("text/plain", TEXT.encode()) == ""


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["something"], "missing"),
        ([TEXT + "".join(pieces_of(4))], "another client's"),
        ([TEXT, TEXT.replace(" ha", "", 1)], "a piece is lost"),
        ([TEXT + TEXT], "comes twice"),
        (["".join(reversed(pieces_of(3)))], "out of order"),
        ([TEXT[: TEXT.index(" ~3d~")]], "the last chunk's text is lost"),
        ([TEXT.replace("\u2028", "\n")], "characters are changed at"),
    ],
)
def test_wrong_texts_are_named(texts: Sequence[str], said: str) -> None:
    assert said in wrong_with(texts, 3)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (SSE, b'data: {"text": "a "quote""}\n\n', "by hand"),
        (SSE, b'data: {"text": "a\nb"}\n\n', "by hand"),
        (SSE, b'data: {"text": "a"}\n', "does not end in an empty line"),
        (NDJSON, b'{"text": "a\nb"}\n', "by hand"),
        ("application/json", b'{"text": "\xff"}', "not UTF-8"),
        ("application/x-odd", b"", "cannot read application/x-odd"),
    ],
)
def test_what_cannot_be_read_is_named(kind: str, body: bytes, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        read_events(kind, body)


def test_sampling_parameters_are_found_by_name() -> None:
    texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    options = {"type": "object", "properties": {"numPredict": {"type": "integer"}, "odd": {"type": "number"}}}
    schema = {
        "properties": {"temperature": {"type": "number"}, "stop": texts, "options": options, "seed": {"type": "string"}}
    }
    found = {str(one): (one.name, one.value) for one in parameters_of(schema, {"options.odd": "min_p"})}
    assert found == {
        "temperature": ("temperature", 0.25),
        "stop": ("stop", "END7"),
        "options.numPredict": ("max_new_tokens", 11),
        "options.odd": ("min_p", 0.125),
    }
    first, *_ = all_ = parameters_of({"properties": {"max_tokens": {}, "max_new_tokens": {}}}, {})
    assert first.put_into({"max_new_tokens": 5, "a": 1}, all_) == {"max_tokens": 11, "a": 1}


class Spells(SmallApi):
    """Streams always, in numbers, under a content type of its own."""

    def routes(self) -> APIRouter:
        router = api_router(dependencies=[USER])
        docs = body_docs(TextBody, EXAMPLE)
        docs["requestBody"]["content"]["application/json"]["schema"] = {"properties": {"text": {"type": "string"}}}
        router.post("/spell", summary="Spell", openapi_extra=docs)(self.spell)
        return router

    async def spell(self, request: Request) -> Response:
        answers = await Answers.submit(self.client, [(await parse_body(request, TextBody)).request()])

        async def lines() -> AsyncGenerator[bytes, None]:
            async for _, chunk in answers.chunks():
                yield line([ord(char) for char in chunk.text])

        return LineStream(lines(), close=answers.aclose)


class SpellsSuite(ApiRouterContract):
    contract = "api"
    factory = Spells

    def texts(self, events: Sequence[Event]) -> list[str]:
        return ["".join(chr(code) for one in events for code in one.data)]


class Shouts(SmallLines):
    """Asks for streams in words of its own."""

    def streamed(self, answers: Answers) -> Response:
        response = super().streamed(answers)
        response.headers["content-type"] = "application/x-shout"
        return response


class ShoutsSuite(ApiRouterContract):
    contract = "api"
    factory = Shouts

    def read(self, exchange: Exchange) -> list[Event]:
        kind = exchange.headers["content-type"].replace("x-shout", "x-ndjson")
        return read_events(kind, exchange.body)


@pytest.mark.parametrize("suite", [SpellsSuite, ShoutsSuite])
def test_authors_say_how_their_texts_are_read(suite: type[Any]) -> None:
    suite().test_stream_holds_the_text()
    suite().test_answers_are_not_mixed_up()


def test_without_it_the_suite_cannot_read_them() -> None:
    plain: Any = type("Plain", (ApiRouterContract,), {"factory": Spells})
    with pytest.raises(AssertionError, match="the text is missing"):
        plain().test_stream_holds_the_text()
    plain = type("Plain", (ApiRouterContract,), {"factory": Shouts})
    with pytest.raises(pytest.fail.Exception, match="cannot read application/x-shout"):
        plain().test_stream_holds_the_text()
