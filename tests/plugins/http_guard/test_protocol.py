"""The HTTP protocol against clients that send too much, too slowly, or nothing at all. Real sockets, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from pegboard.plugins.http_guard.protocol import LEAST_FILE_RATE, MAX_HEAD_BYTES, MAX_HEADERS
from pegboard.toolkit.http.bodies import ANY_SIZE, MOST_BODY
from pegboard.toolkit.http.server import HttpServer
from tests.plugins.http_guard.guarded import guarding

PATIENCE = 30.0
SOON = 0.2
"""A time-out that is waited for."""
NEVER = 600.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Coroutine[Any, Any, Streams]]


class App:
    """Answers with the length of the body, once it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.began = asyncio.Event()
        self.left = 0
        self.reads = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began.set()
        if scope["path"] == "/file":
            scope.setdefault("extensions", {})[MOST_BODY] = ANY_SIZE
        size, more = 0, self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        await self.go.wait()
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"text/plain")]
        if scope["path"] == "/pieces":
            del headers[0]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(3 if scope["path"] == "/pieces" else 0):
            await send({"type": "http.response.body", "body": b"piece,", "more_body": True})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(app: App, timeout: float) -> AsyncIterator[Dial]:
    listener = socket.create_server(("127.0.0.1", 0))
    guard, front = guarding(listener, max_connections=100, request_timeout=timeout)
    server = HttpServer(app, front, [guard])
    serving = asyncio.create_task(server.serve())
    await server.listening(serving)
    writers: list[asyncio.StreamWriter] = []

    async def dial() -> Streams:
        streams = await asyncio.open_connection(*listener.getsockname())
        writers.append(streams[1])
        return streams

    try:
        yield dial
        for writer in writers:
            writer.close()
        while guard.places.taken:
            await asyncio.sleep(0.01)
    finally:
        server.leave()
        await serving


def run(scene: Callable[[App, Dial], Coroutine[Any, Any, None]], timeout: float = NEVER) -> None:
    async def main() -> None:
        app = App()
        async with asyncio.timeout(PATIENCE), listening(app, timeout) as dial:
            await scene(app, dial)

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def refused(reader: asyncio.StreamReader, status: int, code: str) -> None:
    """An error body, and then the end of the connection."""
    got, headers, body = await answer(reader)
    assert got == status
    assert json.loads(body)["error"]["code"] == code
    assert headers["connection"] == "close"
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""


def has_come(reader: asyncio.StreamReader) -> bool:
    """Return whether there is an answer, or the end."""
    return reader.at_eof() or bool(reader._buffer)  # type: ignore[attr-defined]


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 1])
def test_as_many_headers_as_allowed(extra: int) -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(HEAD + b"a: b\r\n" * (MAX_HEADERS - 1 + extra) + b"\r\n")
        if extra:
            await refused(reader, 431, "headers_too_large")
        else:
            assert (await answer(reader))[0] == 200

    run(scene)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("where", ["path", "header", "headers"])
def test_a_head_as_large_as_allowed(where: str, extra: int) -> None:
    """To the byte, also where all of it comes in one read."""
    base = len(b"/" + b"host" + b"x")
    room = MAX_HEAD_BYTES - base + extra

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        if where == "path":
            writer.write(b"POST /" + b"p" * room + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        elif where == "header":
            writer.write(HEAD + b"a: " + b"v" * (room - 1) + b"\r\n\r\n")
        else:
            whole, rest = divmod(room, 1024)
            lines = [b"a: " + b"v" * 1023 for _ in range(whole)] + ([b"b: " + b"v" * (rest - 1)] if rest else [])
            writer.write(HEAD + b"\r\n".join(lines) + b"\r\n\r\n")
        if extra:
            await refused(reader, 431, "headers_too_large")
        else:
            assert (await answer(reader))[0] == 200

    run(scene)


@pytest.mark.parametrize("endless", ["path", "name", "value", "trailer", "chunk extension"])
def test_what_does_not_end_is_cut_off(endless: str) -> None:
    """The parser would collect it for ever, and says nothing of it before its end."""
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    start = {
        "path": b"POST /",
        "name": HEAD + b"x",
        "value": HEAD + b"x: ",
        "trailer": chunked + b"1\r\na\r\n0\r\nx: ",
        "chunk extension": chunked + b"1;x=",
    }[endless]

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"y" * 4096)
                await writer.drain()
                # The server is in the same loop: without this, the kernel would take megabytes before its turn.
                await asyncio.sleep(0)
                if has_come(reader):
                    break
            else:
                pytest.fail("it takes megabytes of it")
            await refused(reader, 431, "headers_too_large")

    run(scene)


def test_bodies_in_the_smallest_chunks_are_taken() -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            writer.write(b"1\r\na\r\n" * 1000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await answer(reader))[2] == b"100000"

    run(scene)


def test_nonsense_gets_an_error_body() -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(b"this is not HTTP\r\n\r\n")
        await refused(reader, 400, "malformed_request")

    run(scene)


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"P", HEAD, HEAD + b"content-length: 5\r\n\r\n", HEAD + b"content-length: 5\r\n\r\nab"]
)
def test_slow_requests_end(sent: bytes) -> None:
    """CVE-2007-6750, "slowloris": headers or a body that never end."""

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(sent)
        await refused(reader, 408, "too_slow")
        while app.began.is_set() and not app.left:
            await asyncio.sleep(0)

    run(scene, SOON)


def test_dripping_does_not_help() -> None:
    """What counts is the whole request, not the time since its last byte."""

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(HEAD)
        with contextlib.suppress(ConnectionError):
            while not has_come(reader):
                writer.write(b"x: y\r\n")
                await asyncio.sleep(SOON / 20)
            await refused(reader, 408, "too_slow")

    run(scene, SOON)


@pytest.mark.parametrize("path", [b"/file", b"/"])
def test_a_file_takes_as_long_as_it_needs(path: bytes) -> None:
    """While it arrives; prompts do not."""
    piece = b"x" * int(LEAST_FILE_RATE * SOON)
    count = 40

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, count * len(piece)))
        with contextlib.suppress(ConnectionError):
            for _ in range(count):
                if has_come(reader):
                    break
                writer.write(piece)
                await asyncio.sleep(SOON / 10)
        if path == b"/file":
            assert (await answer(reader))[2] == str(count * len(piece)).encode()
        else:
            await refused(reader, 408, "too_slow")

    run(scene, SOON)


@pytest.mark.parametrize("answered", [False, True])
def test_a_file_that_drips_ends(answered: bool) -> None:
    """And one that is not read, since its request was refused, has no time of its own."""

    async def scene(app: App, dial: Dial) -> None:
        app.reads = not answered
        reader, writer = await dial()
        writer.write(b"POST /file HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        if answered:
            assert (await answer(reader))[0] == 200
        piece = b"x" * int(LEAST_FILE_RATE * SOON) if answered else b"x"
        with contextlib.suppress(ConnectionError):
            while not has_come(reader):
                writer.write(piece)
                await asyncio.sleep(SOON / 20)
            if not answered:
                await refused(reader, 408, "too_slow")

    run(scene, SOON)


def test_silent_connections_are_closed() -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, _ = await dial()
        assert await reader.read() == b""
        reader, writer = await dial()
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200
        # Without this, empty lines would keep a connection for ever.
        writer.write(b"\r\n")
        assert await reader.read() == b""

    run(scene, SOON)


def test_slow_answers_are_not_slow_requests() -> None:
    async def scene(app: App, dial: Dial) -> None:
        app.go.clear()
        reader, writer = await dial()
        writer.write(HEAD + b"content-length: 3\r\n\r\nabc")
        await asyncio.sleep(3 * SOON)
        app.go.set()
        assert (await answer(reader))[2] == b"3"
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[2] == b"0"

    run(scene, SOON)


def test_a_body_that_nobody_reads_is_not_late() -> None:
    """More than the server buffers, for a route that has not begun to read."""

    async def scene(app: App, dial: Dial) -> None:
        app.go.clear()
        app.reads = False
        reader, writer = await dial()
        writer.write(HEAD + b"content-length: 9000000\r\n\r\n" + b"x" * 9_000_000)
        await asyncio.sleep(3 * SOON)
        app.go.set()
        assert (await answer(reader))[2] == b"0"

    run(scene, SOON)


def test_the_next_request_does_not_cut_off_an_answer() -> None:
    """Pipelined: the second one's head never ends, and the first one is still being answered."""

    async def scene(app: App, dial: Dial) -> None:
        app.go.clear()
        reader, writer = await dial()
        writer.write(HEAD + b"\r\n" + HEAD)
        await asyncio.sleep(3 * SOON)
        app.go.set()
        assert (await answer(reader))[2] == b"0"
        await refused(reader, 408, "too_slow")

    run(scene, SOON)


# ---- what the version of HTTP asks for -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_client_of_the_first_version_gets_no_chunks(method: str) -> None:
    """It does not know them: an answer of unknown length ends where the connection does."""

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(f"{method} /pieces HTTP/1.0\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == (b"piece,piece,piece,0" if method == "GET" else b"")
        reader, writer = await dial()
        writer.write(f"{method} / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: 1" in head
        assert body == (b"0" if method == "GET" else b"")
        reader, writer = await dial()
        writer.write(b"GET /pieces HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"\r\n6\r\npiece,\r\n" in await reader.read()

    run(scene)


def test_a_request_has_one_host() -> None:
    async def scene(app: App, dial: Dial) -> None:
        for headers, fine in ((b"", False), (b"host: x\r\nHost: y\r\n", False), (b"host:\r\n", True)):
            reader, writer = await dial()
            writer.write(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
            if fine:
                assert (await answer(reader))[0] == 200
            else:
                await refused(reader, 400, "bad_host")

    run(scene)


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 5, 100_000])
@pytest.mark.parametrize("cut", ["", "in the head", "behind the head", "in the body", "everywhere"])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(cut: str, size: int, chunked: bool) -> None:
    """As Java's client does, in every request without TLS; and so does what comes after it."""
    body = b"x" * size
    framing = b"content-length: %d\r\n" % size
    if chunked:
        framing = b"transfer-encoding: chunked\r\n"
        body = (b"%x\r\n%b\r\n" % (size, body) if size else b"") + b"0\r\n\r\n"
    head = HEAD + UPGRADE + framing + b"\r\n"
    sent = (head + body) * 2 + HEAD + b"content-length: 3\r\n\r\nabc" + head + body
    at = {"": len(sent), "in the head": 40, "behind the head": len(head), "in the body": len(head) + 3}.get(cut)

    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        for piece in [sent[:at], sent[at:]] if at else [sent[i : i + 1] for i in range(len(sent))]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0 if cut == "everywhere" else 0.01)
        for expected in (size, size, 3, size):
            got, headers, answered = await answer(reader)
            assert (got, answered) == (200, str(expected).encode())
            assert "connection" not in headers

    if cut != "everywhere" or size < 100:
        run(scene)


def test_bounds_hold_for_requests_that_ask_for_another_protocol() -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(HEAD + UPGRADE + b"a: b\r\n" * (MAX_HEADERS - 4) + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(HEAD + UPGRADE + b"a: b\r\n" * (MAX_HEADERS - 3) + b"\r\n")
        await refused(reader, 431, "headers_too_large")
        reader, writer = await dial()
        writer.write(HEAD + UPGRADE + b"content-length: 5\r\n\r\nab")
        await refused(reader, 408, "too_slow")

    run(scene, SOON)


def test_what_follows_a_connect_is_no_request() -> None:
    async def scene(app: App, dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(b"CONNECT /x HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD + b"\r\n")
        got, headers, _ = await answer(reader)
        assert (got, headers["connection"]) == (200, "close")
        assert await reader.read() == b""

    run(scene)
