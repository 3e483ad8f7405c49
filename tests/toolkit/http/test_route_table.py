"""The route table: the same route as the application finds, however it came to be there."""

from __future__ import annotations

import asyncio
from typing import Any

import fastapi
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from pegboard.conformance.asgi import call
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import ADMIN, PUBLIC, USER
from pegboard.toolkit.http.route_table import Routes, levels
from pegboard.toolkit.http.routing import api_router

KEYS = Keys(user=["u"], admin=["a"])


async def answer() -> str:
    return "it"


async def plain(request: Any) -> PlainTextResponse:
    return PlainTextResponse("it")


def application() -> fastapi.FastAPI:
    app = build_app([], max_body_bytes=100, keys=KEYS)
    # As a hook may do it: on the application itself, as a router, with a prefix, as routers inside of routers.
    app.get("/open", dependencies=[PUBLIC])(answer)
    app.post("/open", dependencies=[ADMIN])(answer)
    app.get("/silent")(answer)
    app.get("/things/{name}", dependencies=[ADMIN])(answer)
    app.get("/things/public", dependencies=[PUBLIC])(answer)
    app.get("/files/{path:path}", dependencies=[USER])(answer)
    inner = api_router(dependencies=[USER])
    inner.get("/for-users")(answer)
    inner.get("/for-all", dependencies=[PUBLIC])(answer)
    outer = fastapi.APIRouter(prefix="/outer", dependencies=[ADMIN])
    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/api")
    app.include_router(inner, prefix="/closed", dependencies=[ADMIN])
    app.router.routes.append(Route("/bare", plain))
    app.mount("/mounted", Router([Route("/below", plain)]))
    return app


@pytest.mark.parametrize(
    ("method", "path", "level"),
    [
        ("GET", "/open", "public"),
        ("POST", "/open", "admin"),
        ("DELETE", "/open", "admin"),
        ("GET", "/silent", "admin"),
        ("GET", "/things/x", "admin"),
        # The route with the parameter comes first, and the application takes it.
        ("GET", "/things/public", "admin"),
        ("POST", "/things/x", "admin"),
        ("GET", "/files/a/b", "user"),
        ("PUT", "/files/a/b", "user"),
        ("GET", "/api/outer/inner/for-users", "user"),
        ("GET", "/api/outer/inner/for-all", "public"),
        ("GET", "/closed/for-all", "public"),
        ("GET", "/bare", "admin"),
        ("GET", "/mounted/below", "admin"),
        ("GET", "/nowhere", "admin"),
        ("GET", "//open", "admin"),
        ("GET", "/open/", "admin"),
        ("GET", "/OPEN", "admin"),
        ("GET", "/things/x/../../open", "admin"),
        ("GET", "", "admin"),
        ("get", "/open", "admin"),
    ],
)
def test_levels(method: str, path: str, level: str) -> None:
    scope = {"type": "http", "app": application(), "method": method, "path": path, "root_path": "", "headers": []}
    assert Routes().find(scope).level == level


def test_what_is_added_later_is_noticed() -> None:
    app, routes = application(), Routes()
    scope = {"type": "http", "app": app, "method": "GET", "path": "/later", "root_path": "", "headers": []}
    assert routes.find(scope).level == "admin"
    app.get("/later", dependencies=[PUBLIC])(answer)
    assert routes.find(scope).level == "public"


def test_all_levels_at_once() -> None:
    found = levels(application().routes)
    assert found["GET", "/open"] == "public"
    assert found["POST", "/open"] == "admin"
    assert found["GET", "/silent"] == "admin"
    assert found["GET", "/api/outer/inner/for-users"] == "user"
    assert found["GET", "/bare"] == "admin"
    assert found["*", "/mounted"] == "admin"


@pytest.mark.parametrize(("path", "template"), [("/things/x", "/things/{name}"), ("/open", "/open"), ("/no", "")])
def test_a_route_is_called_by_its_own_path(path: str, template: str) -> None:
    scope = {"type": "http", "app": application(), "method": "GET", "path": path, "root_path": "", "headers": []}
    assert Routes().find(scope).template == template


def test_nothing_behind_a_level_answers_without_a_key() -> None:
    async def scene() -> list[tuple[str, int | None]]:
        app = application()
        paths = ["/open", "/silent", "/things/public", "/files/a", "/api/outer/inner/for-users", "/bare"]
        paths += ["/mounted/below", "/nowhere", "/api/outer/inner/for-all"]
        return [(path, (await call(app, "GET", path)).status) for path in paths]

    answers = asyncio.run(scene())
    assert {path for path, status in answers if status == 200} == {"/open", "/api/outer/inner/for-all"}
    assert {status for _, status in answers} == {200, 401}
