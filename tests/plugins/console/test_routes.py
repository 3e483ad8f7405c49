"""The page and its routes: who may have what, and that the page runs nothing but its own code."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import pytest
from fastapi import FastAPI

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.plugins.console.actions import LOOK, POINTS, RUNS
from pegboard.plugins.console.hooks import Console
from pegboard.plugins.console.page import document
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys

MOST_BYTES = 200_000
ADMIN_ROUTES = ("/console/runs", "/console/about", "/console/events")


class Client(FakeEngineClient):
    """An engine that the console can ask."""

    def __init__(self) -> None:
        super().__init__()
        self.control_answers[LOOK] = {"started": 1, "now": 1.0, "stats": {"running_requests": 3}, "steps": []}
        self.control_answers[RUNS] = {"runs": [], "cached_tokens": 0, "page_size": 1}
        self.control_answers[POINTS] = {"points": [{"point": "idle"}]}

    async def server_info(self) -> dict[str, Any]:
        config = {
            "server": {"port": 1, "admin_key": "***"},
            "apis": [{"use": "openai"}, {"use": "native"}],
            "gates": [],
        }
        return {"config": config, "scheduler": {}, "ready": True}


def application(keys: Keys | None = None) -> FastAPI:
    app = build_app([], keys=keys)
    console = Console()
    console.configure({"server.port": "x.yaml:3", "apis": "preset y"})
    console.register_routes(app, Client())
    return app


def answered(app: FastAPI, path: str, key: str = "") -> Exchange:
    async def asked() -> Exchange:
        exchange = Exchange(app, "GET", path, key=key)
        if path == "/console/events":
            await exchange.until(lambda one: b"event: look" in one.body or one.complete)
            exchange.leave()
        return await exchange.end()

    return asyncio.run(asked())


def test_the_page() -> None:
    done = answered(application(), "/")
    html = done.body.decode()
    assert (done.status, done.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(done.body) < MOST_BYTES
    assert "/* script */" not in html
    assert "/* style */" not in html


def test_no_code_but_the_pages_own_runs() -> None:
    done = answered(application(), "/")
    html = done.body.decode()
    policy = dict(part.split(" ", 1) for part in done.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (code,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize(
    "refused",
    [r"\son\w+=\"", r"\sstyle=\"", "innerHTML", "outerHTML", "insertAdjacent", r"\beval\(", r"document\.write"],
)
def test_texts_never_become_markup(refused: str) -> None:
    assert re.search(refused, document()) is None


def test_nothing_is_fetched_from_elsewhere() -> None:
    found = set(re.findall(r"https?:(?://|%2F%2F)[^\s\"'`)]+", document()))
    assert {url for url in found if "www.w3.org" not in url} == set(), "names of SVG are no addresses"


@pytest.mark.parametrize("path", ADMIN_ROUTES)
@pytest.mark.parametrize(
    ("key", "status"),
    [("", 401), ("wrong", 401), ("user", 403), ("admin", 200)],
    ids=["none", "wrong", "user", "admin"],
)
def test_what_is_not_public_is_for_admins(path: str, key: str, status: int) -> None:
    app = application(Keys(["user"], ["admin"]))
    assert answered(app, path, key).status == status
    assert answered(app, "/").status == 200


@pytest.mark.parametrize("path", ADMIN_ROUTES)
def test_without_keys_all_is_open(path: str) -> None:
    assert answered(application(), path).status == 200


def test_events_come_as_they_are() -> None:
    done = answered(application(), "/console/events")
    assert done.headers["content-type"].startswith("text/event-stream")
    assert b'"stats":{"running_requests":3}' in done.body


def test_the_config_with_origins() -> None:
    about = answered(application(), "/console/about").json()
    assert about["config"] == [
        ["server.port", 1, "x.yaml:3"],
        ["server.admin_key", "***", "default"],
        ["apis[0].use", "openai", "preset y"],
        ["apis[1].use", "native", "preset y"],
        ["gates", [], "default"],
    ]
    assert about["points"] == [{"point": "idle"}]
    assert about["model"]["served_name"] == "fake-model"


def test_a_route_of_a_router_comes_first() -> None:
    app = build_app([])

    @app.get("/")
    async def mine() -> str:
        return "mine"

    Console().register_routes(app, Client())
    assert answered(app, "/").json() == "mine"


def test_the_pages_routes_are_not_documented() -> None:
    app = application()
    assert not [path for path in app.openapi()["paths"] if path == "/" or path.startswith("/console")]
    assert asyncio.run(call(app, "HEAD", "/")).status == 200
