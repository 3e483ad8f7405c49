"""Guards: when each of their methods is asked, and what a server is without any."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pegboard.conformance.asgi import Exchange
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.http_front import HttpFront, HttpGuard
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.bodies import MOST_BODY
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import NEEDED_LEVEL, USER
from pegboard.toolkit.http.loading import Entrance
from pegboard.toolkit.http.server import HttpServer

TLS = Path(__file__).parents[2] / "data" / "tls"
KEY = {"authorization": "Bearer k"}


class Noting(HttpGuard):
    """Notes what it is asked; `no` is what it refuses with, before the keys or around the routes."""

    def __init__(self, name: str, log: list[str], no: str = "") -> None:
        self.name, self.log, self.no = name, log, no

    def refuse(self, scope: Scope) -> InvalidRequest | None:
        self.log.append(f"{self.name} refuse {scope['state'][NEEDED_LEVEL]}")
        return InvalidRequest("no", status=418) if self.no == "refuse" else None

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            self.log.append(f"{self.name} wrap {scope['extensions'][MOST_BODY]}")
            if self.no == "wrap":
                raise InvalidRequest("no", status=418)
            await app(scope, receive, send)

        return wrapped


def asked(guards: Sequence[HttpGuard], body: bytes, **headers: str) -> Exchange:
    app = build_app([], max_body_bytes=100, keys=Keys(user=["k"]), guards=guards)

    @app.post("/echo", dependencies=[USER])
    async def echo(request: fastapi.Request) -> int:
        return len(await request.body())

    async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.encode(), value.encode()) for name, value in headers.items()]
        await app({**scope, "headers": [*scope["headers"], *more]}, receive, send)

    async def scene() -> Exchange:
        return await Exchange(with_headers, "POST", "/echo", body).end()

    return asyncio.run(scene())


def test_guards_are_asked_in_order_and_the_keys_in_between() -> None:
    log: list[str] = []
    guards = [Noting("a", log), Noting("b", log)]
    assert asked(guards, b"hi", **KEY).json() == 2
    assert log == ["a refuse user", "b refuse user", "a wrap 100", "b wrap 100"]
    log.clear()
    assert asked(guards, b"").status == 401
    assert log == ["a refuse user", "b refuse user"]
    log.clear()
    assert asked(guards, b"x" * 101, **KEY).status == 413
    assert log == ["a refuse user", "b refuse user"]


@pytest.mark.parametrize("when", ["refuse", "wrap"])
def test_a_refusal_is_an_error_with_an_id(when: str) -> None:
    log: list[str] = []
    done = asked([Noting("a", log, when), Noting("b", log)], b"", **KEY)
    assert (done.status, done.json()["error"]["message"]) == (418, "no")
    assert done.headers["x-request-id"]
    assert log == ["a refuse user"] if when == "refuse" else ["a refuse user", "b refuse user", "a wrap 100"]


# ---- connections -----------------------------------------------------------------------------------------------------


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await fastapi.Response("hello")(scope, receive, send)


def served(
    scene: Callable[[str], Coroutine[Any, Any, None]],
    guards: Sequence[HttpGuard] = (),
    app: ASGIApp = hello,
    tls: ssl.SSLContext | None = None,
) -> None:
    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(app, HttpFront(listener, keyed=False, tls=tls), guards)
        serving = asyncio.create_task(server.serve())
        await server.listening(serving)
        scheme = "http" if tls is None else "https"
        await scene(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        server.leave()
        await serving

    asyncio.run(main())


@pytest.mark.parametrize("secure", [False, True])
def test_a_server_without_a_guard_serves(secure: bool) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if secure else None
    if tls is not None:
        tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))

    async def scene(url: str) -> None:
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(url)).text == "hello"

    served(scene, [HttpGuard()], tls=tls)


class Closed:
    """Accepts nothing."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_first_guard_that_accepts_does_so_alone() -> None:
    found = Closed()

    class Accepts(HttpGuard):
        def accept(self, front: HttpFront, server: Any) -> Closed:
            return found

    class Late(HttpGuard):
        def accept(self, front: HttpFront, server: Any) -> Closed:
            pytest.fail("it is not asked")

    async def scene(url: str) -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TimeoutException):
                await client.get(url, timeout=0.3)
        assert not found.closed

    served(scene, [HttpGuard(), Accepts(), Late()])
    assert found.closed


def test_the_entrance_refuses_until_there_is_an_application() -> None:
    entrance = Entrance()

    async def scene(url: str) -> None:
        async with httpx.AsyncClient() as client:
            for path in ("/health", "/ping?x=1"):
                assert (await client.get(url + path)).status_code == 200
            assert (await client.post(f"{url}/health", content=b"x" * 300_000)).status_code == 503
            refused = await client.get(f"{url}/ready")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "5")
            assert (await client.head(f"{url}/ready")).content == b""
            entrance.app = hello
            assert (await client.get(f"{url}/ready")).text == "hello"

    served(scene, app=entrance)
