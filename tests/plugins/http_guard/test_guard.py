"""The guard as the server asks it: foreign web pages, names, spare places, and what its hooks read of the config."""

from __future__ import annotations

import asyncio
import gzip
import resource
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import fastapi
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pegboard.conformance.asgi import Exchange
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.http_front import HttpFront
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.http_guard import guard as guard_module
from pegboard.plugins.http_guard.connections import SPARE
from pegboard.plugins.http_guard.guard import OTHER_FILES, Guard
from pegboard.plugins.http_guard.origins import Origins
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.levels import ADMIN, LARGE, PUBLIC, STREAMED, USER
from tests.plugins.http_guard.guarded import guarding

ORIGIN = "https://chat.example.com"


def application(**server: Any) -> fastapi.FastAPI:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guard, _ = guarding(listener, **server)
    app = build_app([], max_body_bytes=100, guards=[guard])

    @app.post("/echo/{name}", dependencies=[USER])
    async def echo(name: str) -> str:
        return name

    @app.get("/alive", dependencies=[PUBLIC])
    async def alive() -> str:
        return "yes"

    return app


def sent(app: fastapi.FastAPI, path: str, pieces: Sequence[bytes], headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Send a body that comes in pieces."""

    async def scene() -> tuple[int, bytes]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def body() -> AsyncIterator[bytes]:
                for piece in pieces:
                    yield piece

            answer = await client.post(path, content=body(), headers=headers)
            return answer.status_code, answer.content

    return asyncio.run(scene())


def ask(app: fastapi.FastAPI, method: str, path: str, *, state: dict[str, Any] | None = None, **more: str) -> Exchange:
    async def changed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"host": "localhost", **{name.replace("_", "-"): value for name, value in more.items()}}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        kept = [one for one in scope["headers"] if one[0] != b"host"]
        await app({**scope, "headers": [*kept, *encoded], "state": dict(state or {})}, receive, send)

    async def scene() -> Exchange:
        return await Exchange(changed, method, path).end()

    return asyncio.run(scene())


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_read_piece_by_piece_has_no_bound(packed: bool) -> None:
    """Neither in bytes, nor in what would be values of a JSON text, nor in the memory of all bodies."""
    app, piece = application(max_body_values=10, max_bodies_bytes=2**20), b'"\xf0\x9f",[{' * 20_000
    for path, mark in (("/file", STREAMED), ("/json", LARGE)):

        @app.post(path, dependencies=[ADMIN, mark])
        async def size(request: fastapi.Request) -> int:
            return sum([len(part) async for part in request.stream()])

    pieces = [gzip.compress(piece * 10)] if packed else [piece] * 10
    headers = {"content-encoding": "gzip"} if packed else {}
    assert sent(app, "/file", pieces, headers) == (200, str(10 * len(piece)).encode())
    assert sent(app, "/json", pieces, headers)[0] == 413


@pytest.mark.parametrize(
    ("method", "site", "origin", "status"),
    [
        ("POST", "cross-site", "https://evil.example.com", 403),
        ("POST", "cross-site", None, 403),
        ("POST", "cross-site", "null", 403),
        ("POST", "cross-site", ORIGIN, 200),
        ("POST", "same-site", "http://127.0.0.1:3000", 403),
        ("POST", "same-site", "null", 403),
        ("POST", "same-site", ORIGIN, 200),
        ("POST", "same-site", "http://localhost", 200),
        ("POST", "same-site", None, 200),
        ("GET", "same-site", "http://127.0.0.1:3000", 404),
        ("POST", "same-origin", ORIGIN, 200),
        ("POST", "none", None, 200),
        ("POST", None, None, 200),
        ("GET", "cross-site", "https://evil.example.com", 404),
    ],
)
def test_pages_of_elsewhere_may_not_act(method: str, site: str | None, origin: str | None, status: int) -> None:
    """A browser sends a plain POST of any page, and would only keep its answer from the page."""
    headers = {name: value for name, value in (("sec_fetch_site", site), ("origin", origin)) if value is not None}
    app = application(origins=(ORIGIN,))
    done = ask(app, method, "/echo/a" if method == "POST" else "/elsewhere", **headers)  # type: ignore[arg-type]
    assert done.status == status
    if status == 403:
        assert done.json()["error"]["code"] == "cross_site"


@pytest.mark.parametrize("keyed", [False, True])
def test_with_keys_a_page_of_the_same_site_needs_one(keyed: bool) -> None:
    headers = [(b"host", b"x"), (b"origin", b"http://x:3000"), (b"sec-fetch-site", b"same-site")]
    refusal = Origins((), None, keyed=keyed).refusal({"method": "POST", "headers": headers})
    assert (refusal is None) == keyed


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("rebound.example", 403)])
def test_names_of_others_are_refused_where_there_is_no_key(host: str, status: int) -> None:
    assert ask(application(), "POST", "/echo/a", host=host).status == status


def test_a_spare_place_is_for_what_is_public() -> None:
    app = application()
    assert ask(app, "GET", "/alive", state={SPARE: True}).status == 200
    refused = ask(app, "POST", "/echo/a", state={SPARE: True})
    assert (refused.status, refused.json()["error"]["code"]) == (503, "busy")
    assert ask(app, "POST", "/nowhere", state={SPARE: True}).status == 503


def test_an_unknown_encoding_has_an_answer_with_an_id() -> None:
    done = ask(application(), "POST", "/echo/a", content_encoding="br")
    assert (done.status, done.json()["error"]["code"]) == (415, "unknown_encoding")
    assert done.headers["x-request-id"]


def test_the_config_says_what_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(guard_module, "bound_kept_memory", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    server = {"max_connections": 500, "request_timeout": 7}
    resolved = compose(data={"model": {"path": "x"}, "apis": [], "server": server}, env={})
    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    hooks.call.configure(config=resolved.engine, origins=resolved.origins)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        [guard] = hooks.call.guard_http(front=HttpFront(listener, keyed=False))
    assert isinstance(guard, Guard)
    assert (guard.places.free_places, guard._request_timeout) == (500, 7)
    assert set_to == [(500 + OTHER_FILES, 1000)]
