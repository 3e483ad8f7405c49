"""Places: who makes room for whom, by a clock of the test's own; and clients that keep a place without reading."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from pegboard.plugins.http_guard import connections
from pegboard.plugins.http_guard.connections import IDLE_GRACE, SLOW_GRACE, SPARE_PLACES, Acceptor, Place, Places
from pegboard.toolkit.http.server import HttpServer
from tests.plugins.http_guard.guarded import guarding

PATIENCE = 30.0


class Hall:
    """Three places, and what became of those who had one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.places = Places(3, clock=lambda: self.now)
        self.ended: list[str] = []
        self.reading: set[str] = set()

    def enter(self, name: str) -> Place:
        place = self.places.take()

        def end(at_once: bool) -> bool:
            if name in self.reading and not at_once:
                return False
            self.ended.append(name)
            return True

        place.end = end
        return place


def test_the_longest_idle_makes_room() -> None:
    hall = Hall()
    first, second, third = (hall.enter(name) for name in ("first", "second", "third"))
    hall.now = 1.0
    first.is_busy()
    first.is_idle()
    hall.now = 1.0 + IDLE_GRACE
    assert not hall.enter("fourth").spare
    assert hall.ended == ["second"]
    third.leave()
    third.leave()
    assert not hall.enter("fifth").spare
    assert (hall.ended, hall.places.taken) == (["second"], 3)
    second.is_idle()
    second.leave()
    assert hall.places.taken == 3, "it has had its end"


def test_nobody_makes_room_at_once() -> None:
    """A crowd that comes in one turn of the loop has had no time to ask for anything."""
    hall = Hall()
    for number in range(3):
        hall.enter(str(number))
    hall.now = 0.9 * IDLE_GRACE
    assert hall.enter("late").spare
    assert (hall.ended, hall.places.taken, hall.places.spare_taken) == ([], 3, 1)


def test_those_at_work_stay_and_the_slow_get_longer() -> None:
    hall = Hall()
    working, slow, reading = (hall.enter(name) for name in ("working", "slow", "reading"))
    working.is_busy()
    slow.is_slow()
    hall.reading.add("reading")
    hall.now = 0.9 * SLOW_GRACE
    assert hall.enter("spare").spare, "its client still reads"
    hall.now = SLOW_GRACE
    assert not hall.enter("next").spare
    assert hall.ended == ["slow"]
    hall.now = 1.9 * SLOW_GRACE
    assert not hall.enter("after").spare
    assert hall.ended == ["slow", "next"]
    hall.reading.clear()
    reading.leave()
    hall.enter("last").is_busy()
    hall.now += 100
    assert not hall.enter("more").spare
    assert "working" not in hall.ended


def test_spare_places_go_to_the_latest() -> None:
    hall = Hall()
    for number in range(3):
        hall.enter(str(number)).is_busy()
    for number in range(SPARE_PLACES + 2):
        assert hall.enter(f"spare {number}").spare
    assert hall.ended == ["spare 0", "spare 1"]
    assert (hall.places.taken, hall.places.spare_taken) == (3, SPARE_PLACES)


# ---- over real sockets -----------------------------------------------------------------------------------------------


class App:
    """Sends as much as its path says, once it has the whole body."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        size = int(scope["path"][1:] or 0)
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, size, 1 << 20):
            body = bytes(min(1 << 20, size - start))
            await send({"type": "http.response.body", "body": body, "more_body": start + len(body) < size})
        if not size:
            await send({"type": "http.response.body"})
        self.left.set()


@dataclass
class Served:
    http: HttpServer
    places: Places


def run(
    scene: Callable[[App, Served, Any], Coroutine[Any, Any, None]], *, places: Places | None = None, **bounds: Any
) -> None:
    async def main() -> None:
        app, listener = App(), socket.create_server(("127.0.0.1", 0))
        # What the kernel takes for a client that does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        guard, front = guarding(listener, **{"max_connections": 10, "request_timeout": 600.0, **bounds})
        guard.places = places or guard.places
        server = HttpServer(app, front, [guard])
        serving = asyncio.create_task(server.serve())
        await server.listening(serving)
        async with asyncio.timeout(PATIENCE):
            await scene(app, Served(server, guard.places), listener.getsockname())
        server.leave()
        await serving

    asyncio.run(main())


async def ask(address: Any, path: str, rest: bytes = b"\r\n") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode() + rest)
    return reader, writer


@pytest.mark.parametrize("size", [8 << 20, 64 << 20])
def test_answers_that_nobody_reads_are_cut_off(size: int) -> None:
    """Whether the application is through with its answer or waits to go on."""

    async def scene(app: App, server: Served, address: Any) -> None:
        _, writer = await ask(address, f"/{size}")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not server.places.taken:
            await asyncio.sleep(0)
        while server.places.taken:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    run(scene, request_timeout=0.3)


def test_answers_that_are_read_slowly_are_not() -> None:
    size, parts, timeout = 1 << 20, 16, 1.0

    async def scene(app: App, server: Served, address: Any) -> None:
        reader, writer = await ask(address, f"/{size}")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(parts):
            await reader.readexactly(size // parts)
            await asyncio.sleep(timeout / 10)
        writer.close()

    run(scene, request_timeout=timeout)


class Hovering(asyncio.Transport):
    """A transport whose buffer is as full as ever, because as much is read as is written."""

    aborted = False

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 40_000

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    close = abort


def test_an_answer_is_read_where_its_buffer_stays_as_full() -> None:
    async def scene(app: App, server: Served, address: Any) -> None:
        transport, accepting = Hovering(), server.http._accepting
        assert isinstance(accepting, Acceptor)
        protocol: Any = accepting._protocol(server.places.take())
        protocol.connection_made(transport)
        protocol.transport.write(b"x" * 50_000)
        protocol.pause_writing()
        for _ in range(3):
            protocol.transport.write(b"x" * 1000)
            protocol._look_at_reader()
            assert not transport.aborted
        protocol._look_at_reader()
        assert transport.aborted, "nothing has been read"
        protocol.connection_lost(None)

    run(scene)


def test_a_slow_body_makes_room_and_is_told() -> None:
    now = 0.0

    async def scene(app: App, server: Served, address: Any) -> None:
        nonlocal now
        slow, slow_writer = await ask(address, "/", b"content-length: 5\r\n\r\nab")
        while not server.places._slow:
            await asyncio.sleep(0)
        now = SLOW_GRACE
        reader, writer = await ask(address, "/")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in await slow.readuntil(b"\r\n\r\n")
        assert b"while connections are short" in await slow.read()
        for one in (writer, slow_writer):
            one.close()

    run(scene, places=Places(1, clock=lambda: now))


def test_a_spare_place_that_is_needed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not had the time that others have, so nothing was too slow."""
    monkeypatch.setattr(connections, "SPARE_PLACES", 1)

    async def scene(app: App, server: Served, address: Any) -> None:
        _, first = await ask(address, "/", b"content-length: 5\r\n\r\nab")
        while not server.places._slow:
            await asyncio.sleep(0)
        spare, second = await ask(address, "/", b"content-length: 5\r\n\r\nab")
        while len(server.http.server_state.tasks) < 2:
            await asyncio.sleep(0)
        _, third = await ask(address, "/")
        assert b" 503 " in await spare.readuntil(b"\r\n\r\n")
        assert b'"busy"' in await spare.read()
        for one in (first, second, third):
            one.close()

    run(scene, places=Places(1, clock=lambda: 0.0))


def test_a_slow_body_behind_another_request_makes_room_too() -> None:
    """Sent in one piece, the second request is there before the first one's answer has begun."""
    now = 0.0

    async def scene(app: App, server: Served, address: Any) -> None:
        nonlocal now
        second = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"
        slow, slow_writer = await ask(address, "/", b"\r\n" + second)
        assert b"200 OK" in await slow.readuntil(b"\r\n\r\n")
        while not server.places._slow:
            await asyncio.sleep(0)
        now = SLOW_GRACE
        reader, writer = await ask(address, "/")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in await slow.readuntil(b"\r\n\r\n")
        for one in (writer, slow_writer):
            one.close()

    run(scene, places=Places(1, clock=lambda: now))


def test_a_whole_body_behind_another_request_is_not_slow() -> None:
    async def scene(app: App, server: Served, address: Any) -> None:
        second = b"POST /9 HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
        reader, writer = await ask(address, "/", b"\r\n" + second)
        for _ in range(2):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert not server.places._slow
        writer.close()

    run(scene)
