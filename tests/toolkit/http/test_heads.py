"""HEAD wherever GET is, and paths that are not there."""

from __future__ import annotations

import asyncio
from typing import Any

import fastapi
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from pegboard.conformance.asgi import Exchange
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import ADMIN, PUBLIC, USER, is_admin
from tests.faults.whole_api import ask, bearer


async def text() -> PlainTextResponse:
    return PlainTextResponse("some text", headers={"x-kind": "get"})


async def own(request: fastapi.Request) -> PlainTextResponse:
    return PlainTextResponse("", headers={"x-kind": request.method.lower()})


async def admin(request: fastapi.Request) -> bool:
    return is_admin(request)


def application(keys: Keys | None = None) -> fastapi.FastAPI:
    app = build_app([], max_body_bytes=100, keys=keys)
    app.get("/open", dependencies=[PUBLIC])(text)
    app.get("/things/{name}", dependencies=[USER])(text)
    app.get("/secret", dependencies=[ADMIN])(text)
    app.post("/post-only", dependencies=[USER])(text)
    app.get("/admin", dependencies=[USER])(admin)
    app.router.routes.append(Route("/own", own, methods=["HEAD"]))
    return app


def asked(method: str, path: str, *, keys: Keys | None = None, **headers: str) -> tuple[Exchange, Any]:
    seen: dict[str, Any] = {}

    async def scene() -> Exchange:
        app = application(keys)

        async def watching(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            seen.update(scope)

        return await ask(watching, method, path, **headers)  # type: ignore[arg-type]

    return asyncio.run(scene()), seen


@pytest.mark.parametrize("path", ["/open", "/things/x"])
def test_head_is_get_without_the_body(path: str) -> None:
    done, scope = asked("HEAD", path)
    get, _ = asked("GET", path)
    assert (done.status, done.body) == (200, b"")
    assert (get.status, get.body) == (200, b"some text")
    assert done.headers["content-length"] == get.headers["content-length"] == "9"
    assert scope["method"] == "HEAD", "servers look there before they send a body"
    assert scope["route"].path.startswith(path[:5]), "metrics count by route"


def test_what_takes_head_itself_is_asked() -> None:
    assert asked("HEAD", "/own")[0].headers["x-kind"] == "head"


def test_head_of_what_cannot_be_got() -> None:
    done, _ = asked("HEAD", "/post-only")
    assert (done.status, done.headers["allow"], done.body) == (405, "POST", b"")
    assert asked("HEAD", "/nowhere")[0].status == 404
    assert asked("POST", "/open")[0].headers["allow"] == "GET, HEAD"


KEYS = Keys(user=["u"], admin=["a"])


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/open", [200, 200, 200]),
        ("/things/x", [401, 200, 200]),
        ("/secret", [401, 403, 200]),
        ("/nowhere", [401, 404, 404]),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_head_needs_what_get_needs(method: str, path: str, statuses: list[int]) -> None:
    headers: list[dict[str, str]] = [{}, dict(bearer("u")), dict(bearer("a"))]
    assert [asked(method, path, keys=KEYS, **one)[0].status for one in headers] == statuses


def test_who_takes_head_says_who_may() -> None:
    """A mounted application takes every method: its level counts, and not that of the GET route before it."""

    async def scene() -> list[int | None]:
        app = application(KEYS)
        app.mount("/", Router([Route("/open", own, methods=["HEAD"])]))
        return [(await ask(app, "HEAD", "/open", **one)).status for one in ({}, bearer("u"), bearer("a"))]  # type: ignore[arg-type]

    assert asyncio.run(scene()) == [401, 403, 200]


def test_a_route_may_tell_admins_more() -> None:
    found = [asked("GET", "/admin", keys=KEYS, **dict(bearer(key)))[0].json() for key in ("u", "a")]
    assert found == [False, True]
    assert asked("GET", "/admin")[0].json() is True, "without keys all are admins"
