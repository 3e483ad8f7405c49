"""Packed request bodies: what they hold counts, and what cannot be unpacked is said."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import weakref
from typing import Any

import pytest
from backports import zstd
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.http_guard import encodings
from pegboard.plugins.http_guard.bodies import BodyGuard
from pegboard.plugins.http_guard.encodings import PIECE
from pegboard.toolkit.http.bodies import MOST_BODY, RequestModel, parse_body
from pegboard.toolkit.http.errors import answer_error
from pegboard.toolkit.http.events import disconnect

MOST = 400_000
PACKERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "zstd": zstd.compress, "ZSTD, identity": zstd.compress}


class Body(RequestModel):
    text: str


class Server:
    """An application behind the guard that keeps what it was sent, and waits for the client to leave."""

    def __init__(self, most: int = MOST) -> None:
        self.guard = BodyGuard(self.app, 2**16, 2**26)
        self.most = most
        self.texts: list[str] = []

    def between(self) -> None:
        """Called before each piece of the body."""

    def note(self) -> None:
        """Called when the body is over, and the request is not."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.texts.append((await parse_body(Request(scope, receive), Body)).text)
            self.note()
            await disconnect(receive)
        except InvalidRequest as error:
            self.note()
            await answer_error(error)(scope, receive, send)
        else:
            await Response()(scope, receive, send)

    async def post(self, encoding: str, pieces: list[bytes]) -> tuple[int, bytes]:
        """Send a body in pieces, and then leave; status and body of the answer."""
        messages: list[Message] = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
        messages += [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
        sent: list[Message] = []

        async def receive() -> Message:
            self.between()
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-encoding", encoding.encode()), (b"content-length", str(sum(map(len, pieces))).encode())]
        extensions = {MOST_BODY: self.most}
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "extensions": extensions}
        try:
            await self.guard(scope, receive, send)
        except InvalidRequest as error:
            await answer_error(error)(scope, receive, send)
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)


def post(encoding: str, *pieces: bytes) -> tuple[int, bytes, list[str]]:
    server = Server()
    status, body = asyncio.run(server.post(encoding, list(pieces)))
    return status, body, server.texts


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("text", ["ä", "x" * (MOST - 20), "é😀" * 30_000], ids=["short", "long", "wide"])
def test_packed_bodies_are_read_whatever_way_they_arrive(encoding: str, text: str) -> None:
    data = json.dumps({"text": text}, ensure_ascii=False).encode()
    packed = PACKERS[encoding](data)  # type: ignore[operator]
    assert post(encoding, packed) == (200, b"", [text])
    assert post(encoding, *(packed[at : at + 7] for at in range(0, len(packed), 7)))[2] == [text]
    halves = PACKERS[encoding](data[: len(data) // 2]) + PACKERS[encoding](data[len(data) // 2 :])  # type: ignore[operator]
    assert post(encoding, halves)[2] == [text], "members that follow each other are one body"


@pytest.mark.parametrize("encoding", PACKERS)
def test_what_was_packed_counts_and_takes_no_memory(encoding: str) -> None:
    bomb = PACKERS[encoding](b'{"text": "' + bytes(100 * 1024 * 1024) + b'"}')  # type: ignore[operator]
    assert len(bomb) < MOST
    tracemalloc.start()
    try:
        status, body, _ = post(encoding, bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert peak < 3 * MOST + 20 * PIECE
    values = PACKERS[encoding](b'{"text": [' + b"1," * 2**17 + b"1]}")  # type: ignore[operator]
    assert json.loads(post(encoding, values)[1])["error"]["code"] == "too_many_values"


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_what_cannot_be_unpacked_is_told(encoding: str) -> None:
    packed = PACKERS[encoding](json.dumps({"text": "x" * 3000}).encode())  # type: ignore[operator]
    for spoiled in (packed[:-5], packed[:4], b"{}", packed + b"rest", b"\0" * 100, packed[:20] + b"\xff" * 20):
        status, body, texts = post(encoding, spoiled)
        assert (status, json.loads(body)["error"]["code"], texts) == (400, "bad_encoding", []), spoiled
        assert encoding in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "gzip, zstd", "x" * 1000])
def test_other_encodings_are_refused_unread(encoding: str) -> None:
    status, body, texts = post(encoding, b'{"text": "x"}')
    error = json.loads(body)["error"]
    assert (status, error["code"], texts) == (415, "unknown_encoding", [])
    assert "gzip and zstd" in error["message"]
    assert len(error["message"]) < 200


def test_identity_is_no_encoding() -> None:
    assert post("identity", b'{"text": "x"}') == (200, b"", ["x"])


SKIPPED = b"\x50\x2a\x4d\x18" + (0).to_bytes(4, "little")
"""A frame of zstd's with nothing in it, which unpackers pass over."""


@pytest.mark.parametrize(
    ("encoding", "member"),
    [("gzip", gzip.compress(b"")), ("zstd", zstd.compress(b"")), ("zstd", SKIPPED)],
    ids=["gzip", "zstd", "skipped"],
)
def test_members_with_nothing_in_them_are_few(encoding: str, member: bytes) -> None:
    packed = PACKERS[encoding](b'{"text": "x"}')  # type: ignore[operator]
    assert post(encoding, member * 1000 + packed)[2] == ["x"]
    status, body, texts = post(encoding, member * 3000 + packed)
    assert (status, json.loads(body)["error"]["code"], texts) == (413, "body_too_large", [])


def test_what_arrives_counts_too() -> None:
    """It may be unpacked to nothing, and would come without end."""
    skipped = SKIPPED[:4] + (2**31).to_bytes(4, "little") + bytes(99_000)
    status, body, _ = post("zstd", *[skipped, *[bytes(99_000)] * 3])
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_encoding"), "it ends in the middle"
    status, body, _ = post("zstd", *[skipped, *[bytes(99_000)] * 5])
    assert (status, json.loads(body)["error"]["message"]) == (413, f"the body exceeds {MOST} bytes")


class Watched(Server):
    """Counts the unpackers that are there, and the room that bodies hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(2**25)
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()
        self.left: list[tuple[int, int]] = []
        self.held: list[int] = []
        make = encodings._Unpacker.__init__

        def made(member: Any, *arguments: Any) -> None:
            make(member, *arguments)
            self.open.add(member)

        monkeypatch.setattr(encodings._Unpacker, "__init__", made)

    def between(self) -> None:
        self.held.append(self.guard._budget.held)

    def note(self) -> None:
        self.left.append((len(self.open), self.guard._budget.held))


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_that_is_over_holds_no_unpacker(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of zstd has a window of megabytes, and the request may take minutes."""
    packed = PACKERS[encoding](json.dumps({"text": "x" * 3000}).encode())  # type: ignore[operator]
    for data in (packed, packed[:-5], packed[:20] + b"\xff" * 20, packed + b"rest"):
        server = Watched(monkeypatch)
        asyncio.run(server.post(encoding, [data]))
        assert [count for count, _ in server.left] == [0], data
        monkeypatch.undo()


def test_a_window_takes_room_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes open one of 8 MiB, and their sender may take its time with the rest."""
    option = zstd.CompressionParameter
    options = {option.window_log: 23, option.content_size_flag: 0, option.compression_level: 3}
    size = 12 * 2**20
    packer = zstd.ZstdCompressor(options=options)  # type: ignore[arg-type]
    first = packer.compress(b'{"text": "x"' + b" " * size, mode=packer.FLUSH_BLOCK)
    assert len(first) < 2000
    server = Watched(monkeypatch)
    status, _ = asyncio.run(server.post("zstd", [first, packer.compress(b"}", mode=packer.FLUSH_FRAME)]))
    assert (status, server.texts) == (200, ["x"])
    assert size + 2**23 <= server.held[1] < size + 2**23 + 2**20
    assert server.left[0][1] < 2**20, "the window is gone, and so are the bytes that were parsed"
    assert server.guard._budget.held == 0
