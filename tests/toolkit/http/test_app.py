"""The application around the routers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import fastapi
import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.app import build_app, sample_request
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.openapi import body_docs
from pegboard.toolkit.http.routing import api_router


class Body(RequestModel):
    text: str = ""


class Plain(ApiRouter):
    """Routes without any of the toolkit's help."""

    path = "/plain"

    def router(self) -> fastapi.APIRouter:
        return fastapi.APIRouter()

    def routes(self) -> fastapi.APIRouter:
        router = self.router()

        @router.post(self.path, summary="Echo", openapi_extra=body_docs(Body, {"text": "hi"}))
        async def echo(request: fastapi.Request) -> str:
            return (await parse_body(request, Body)).text

        @router.get(self.path + "/typed", summary="Typed")
        async def typed(number: int) -> int:
            return number

        @router.get(self.path + "/bug", summary="Bug")
        async def bug() -> None:
            raise RuntimeError("a secret detail")

        @router.get(self.path + "/refuse", summary="Refuse")
        async def refuse() -> None:
            raise InvalidRequest("no", status=418, param="x")

        return router


class Other(Plain):
    path = "/other"


class Terse(Plain):
    """Has an error format of its own."""

    path = "/terse"

    def router(self) -> fastapi.APIRouter:
        return api_router(errors=lambda error: json_response({"oops": error.message}, error.status))


async def plain(cls: type[Plain] = Plain) -> Plain:
    return cls(None, ApiContext(FakeEngineClient(), 100))


def ask(method: str, path: str, body: Any = None) -> Exchange:
    async def scene() -> Exchange:
        return await call(build_app([("plain", await plain())], max_body_bytes=100), method, path, body)

    return asyncio.run(scene())


def test_two_routers_may_not_claim_one_path() -> None:
    async def scene() -> None:
        build_app([("a", await plain()), ("b", await plain(Other))], max_body_bytes=1)
        with pytest.raises(ConfigError, match="both 'a' and 'b' offer POST /plain"):
            build_app([("a", await plain()), ("b", await plain())], max_body_bytes=1)

    asyncio.run(scene())


def test_sample_request_is_the_first_documented_example() -> None:
    async def scene() -> None:
        assert sample_request([("plain", await plain())]) == ("/plain", {"text": "hi"})

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/nowhere", None, 404, "/nowhere"),
        ("DELETE", "/plain", None, 405, "DELETE"),
        ("POST", "/plain", b"{", 400, "JSON"),
        ("POST", "/plain", {"text": 5}, 400, "text"),
        ("POST", "/plain", b"x" * 101, 413, "100 bytes"),
        ("GET", "/plain/typed?number=x", None, 400, "number"),
        ("GET", "/plain/refuse", None, 418, "no"),
    ],
)
def test_errors_are_json(method: str, path: str, body: Any, status: int, words: str) -> None:
    done = ask(method, path, body)
    assert done.status == status
    assert words in done.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/terse/nowhere/at/all", None, 404),
        ("DELETE", "/terse", None, 405),
        ("POST", "/terse", b"{", 400),
        ("POST", "/terse", b"x" * 101, 413),
        ("GET", "/terse/typed?number=x", None, 400),
        ("GET", "/terse/refuse", None, 418),
    ],
)
def test_errors_have_the_format_of_the_api_they_belong_to(method: str, path: str, body: Any, status: int) -> None:
    async def scene() -> tuple[Exchange, Exchange]:
        app = build_app([("plain", await plain()), ("terse", await plain(Terse))], max_body_bytes=100)
        elsewhere = path.replace("/terse", "/plain")
        return await call(app, method, path, body), await call(app, method, elsewhere, body)

    own, other = asyncio.run(scene())
    assert own.status == other.status == status
    assert list(own.json()) == ["oops"]
    assert list(other.json()) == ["error"]
    assert own.json()["oops"].replace("/terse", "/plain") == other.json()["error"]["message"]


def test_bugs_show_no_details(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> Exchange:
        exchange = Exchange(build_app([("plain", await plain())], max_body_bytes=100), "GET", "/plain/bug")
        with pytest.raises(RuntimeError):
            await exchange.end()
        return exchange

    with caplog.at_level(logging.CRITICAL):
        done = asyncio.run(scene())
    assert done.status == 500
    assert b"secret" not in done.body
    assert done.json()["error"]["code"] == "internal_error"


def test_body_limit_counts_what_arrives() -> None:
    async def scene(size: int) -> Exchange:
        app = build_app([("plain", await plain())], max_body_bytes=100)
        body = b'{"text": "' + b"x" * (size - 12) + b'"}'
        return await Exchange(app, "POST", "/plain", body, announce_length=False).end()

    assert asyncio.run(scene(100)).status == 200
    assert asyncio.run(scene(101)).status == 413
