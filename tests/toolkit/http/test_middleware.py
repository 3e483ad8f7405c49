"""What every request meets: its id, the log, rules for browsers, and what a bug looks like."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import fastapi
import pytest
from starlette.types import Receive, Scope, Send

from pegboard.conformance.asgi import Exchange
from pegboard.core.config.sections import CorsSection
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import PUBLIC, USER, principal_of
from pegboard.toolkit.system.logs import JsonFormatter

ORIGIN = "https://chat.example.com"


def application(**options: Any) -> fastapi.FastAPI:
    app = build_app([], max_body_bytes=100, **options)

    @app.post("/echo/{name}", dependencies=[USER])
    async def echo(name: str, request: fastapi.Request) -> dict[str, str]:
        return {"name": name, "request": request.state.request_id}

    @app.get("/who", dependencies=[PUBLIC])
    async def who(request: fastapi.Request) -> str:
        return principal_of(request)

    @app.get("/bug", dependencies=[PUBLIC])
    async def bug() -> None:
        raise RuntimeError("a secret detail")

    return app


def ask(app: fastapi.FastAPI, method: str, path: str, *, raises: bool = False, **headers: str) -> Exchange:
    async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await app({**scope, "headers": [*scope["headers"], *more]}, receive, send)

    async def scene() -> Exchange:
        exchange = Exchange(with_headers, method, path)
        if raises:
            with pytest.raises(RuntimeError):
                await exchange.end()
        else:
            await exchange.end()
        return exchange

    return asyncio.run(scene())


# ---- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "A.b_c:d", "x" * 128])
def test_a_client_names_its_request(given: str) -> None:
    done = ask(application(), "POST", "/echo/a", x_request_id=given)
    assert done.headers["x-request-id"] == given == done.json()["request"]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\x00b", "é", "<script>", "a\r\nset-cookie: x"])
def test_what_is_no_name_is_replaced(given: str) -> None:
    done = ask(application(), "POST", "/echo/a", x_request_id=given)
    assert re.fullmatch("[0-9a-f]{32}", done.headers["x-request-id"])
    assert done.json()["request"] == done.headers["x-request-id"]


def test_every_answer_has_an_id_of_its_own() -> None:
    app = application(keys=Keys(user=["k"]))
    answers = [ask(app, "POST", "/echo/a"), ask(app, "GET", "/nowhere"), ask(app, "GET", "/bug", raises=True)]
    assert [one.status for one in answers] == [401, 401, 500]
    assert len({one.headers["x-request-id"] for one in answers}) == 3


# ---- bugs ------------------------------------------------------------------------------------------------------------


def test_routes_learn_whose_key_asks() -> None:
    app = application(keys=Keys(["a-key", "b-key"], ["c-key"], {"a-key": "alice"}))
    asked = {key: ask(app, "GET", "/who", authorization=f"Bearer {key}").json() for key in ("a-key", "b-key", "c-key")}
    assert asked == {"a-key": "alice", "b-key": "2", "c-key": "3"}
    assert ask(app, "GET", "/who").json() == "0"
    assert ask(application(), "GET", "/who", authorization="Bearer a-key").json() == ""


def test_bugs_are_errors_that_browsers_can_read() -> None:
    done = ask(application(cors=CorsSection(allow_origins=("*",))), "GET", "/bug", raises=True, origin=ORIGIN)
    assert (done.status, done.json()["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in done.body
    assert done.headers["access-control-allow-origin"] == "*"


# ---- the log ---------------------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.endswith("middleware")]


def test_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    app = application(access_log=True, keys=Keys(user=["secret-key"]))
    with caplog.at_level("INFO"):
        ask(app, "POST", "/echo/a?q=hidden", x_request_id="r1", authorization="Bearer secret-key")
        ask(app, "POST", "/echo/a", x_api_key="wrong-key")
        ask(app, "GET", "/nowhere", authorization="Bearer secret-key")
        ask(app, "GET", "/bug", raises=True)
    lines = [record.getMessage() for record in logged(caplog)]
    assert re.fullmatch(r"POST /echo/a 200 in [\d.]+ ms \(request r1 from 127\.0\.0\.1:1\)", lines[0])
    assert [line.split()[:3] for line in lines[1:]] == [
        ["POST", "/echo/a", "401"],
        ["GET", "/nowhere", "404"],
        ["GET", "/bug", "500"],
    ]
    assert not [word for word in ("hidden", "secret-key", "wrong-key") if word in caplog.text]


def test_the_figures_of_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ask(application(access_log=True), "POST", "/echo/a", x_request_id="r1")
    [record] = logged(caplog)
    fields = json.loads(JsonFormatter("api").format(record))
    assert {name: fields[name] for name in ("method", "path", "route", "status", "request_id", "client")} == {
        "method": "POST",
        "path": "/echo/a",
        "route": "/echo/{name}",
        "status": 200,
        "request_id": "r1",
        "client": "127.0.0.1:1",
    }
    assert fields["ms"] >= 0


def test_no_line_ends_in_a_path(caplog: pytest.LogCaptureFixture) -> None:
    """A path is the client's: it must not make lines of its own, nor move a terminal's cursor, nor be endless."""
    with caplog.at_level("INFO"):
        ask(application(access_log=True), "GET", "/a\r\n2026 api ERROR stolen\x1b[2J\u2028é" + "x" * 5000)
    [record] = logged(caplog)
    assert record.getMessage().isprintable()
    assert record.getMessage().isascii()
    assert len(record.getMessage()) < 1000


def test_those_who_leave_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    app = application(access_log=True)

    @app.get("/slow", dependencies=[PUBLIC])
    async def slow() -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        exchange = Exchange(app, "GET", "/slow")
        for _ in range(20):
            await asyncio.sleep(0)
        exchange._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.end()

    with caplog.at_level("INFO"):
        asyncio.run(scene())
    [record] = logged(caplog)
    assert record.getMessage().startswith("GET /slow 499 in")


def test_silent_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ask(application(), "POST", "/echo/a")
    assert logged(caplog) == []


# ---- browsers --------------------------------------------------------------------------------------------------------


def preflight(app: fastapi.FastAPI, origin: str = ORIGIN) -> Exchange:
    return ask(
        app,
        "OPTIONS",
        "/echo/a",
        origin=origin,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )


def test_other_origins_are_kept_out_unless_named() -> None:
    app = application()
    assert preflight(app).status == 405
    done = ask(app, "POST", "/echo/a", origin=ORIGIN)
    assert "access-control-allow-origin" not in done.headers


def test_named_origins_are_let_in() -> None:
    app = application(cors=CorsSection(allow_origins=(ORIGIN,), max_age=7), keys=Keys(user=["k"]))
    asked = preflight(app)
    assert asked.status == 200, "a preflight brings no key"
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert asked.headers["access-control-max-age"] == "7"
    assert "access-control-allow-credentials" not in asked.headers
    done = ask(app, "POST", "/echo/a", origin=ORIGIN, authorization="Bearer k")
    assert (done.status, done.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-request-id" in done.headers["access-control-expose-headers"]
    refused = ask(app, "POST", "/echo/a", origin=ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    other = preflight(app, "https://evil.example.com")
    assert (other.status, "access-control-allow-origin" in other.headers) == (400, False)


@pytest.mark.parametrize(
    ("origin", "good"),
    [
        ("*", True),
        ("https://a.example.com", True),
        ("http://localhost:3000", True),
        ("chrome-extension://abcdef", True),
        ("a.example.com", False),
        ("https://a.example.com/", False),
        ("https://a.example.com/path", False),
        ("https://*.example.com?", False),
        ("", False),
    ],
)
def test_origins_are_checked(origin: str, good: bool) -> None:
    if good:
        assert CorsSection(allow_origins=(origin,)).allow_origins == (origin,)
    else:
        with pytest.raises(ValueError, match="allow_origins"):
            CorsSection(allow_origins=(origin,))


# ---- other protocols -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [Keys(), Keys(user=["k"])])
def test_no_other_protocol_goes_past_the_keys(keys: Keys) -> None:
    sent: list[str] = []
    app = application(keys=keys)

    @app.websocket("/socket")
    async def socket(websocket: fastapi.WebSocket) -> None:
        await websocket.accept()

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/socket", "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    assert sent == ([] if keys else ["websocket.accept"])
