"""The HTTP protocol of servers without a guard. Real sockets, one event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from pegboard.core.interfaces.http_front import HttpFront
from pegboard.toolkit.http.server import HttpServer


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def answers_to(sent: bytes) -> bytes:
    async def main() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(echo, HttpFront(listener, False))
        serving = asyncio.create_task(server.serve())
        await server.listening(serving)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            writer.write(sent)
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
            server.leave()
            await serving

    return asyncio.run(main())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(protocol: bytes) -> None:
    """And so does the one behind it."""
    upgrade = b"connection: upgrade\r\nupgrade: %b\r\n" % protocol
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
    got = answers_to(head + upgrade + b"\r\nfirst" + head + b"connection: close\r\n\r\nother")
    assert [part.rpartition(b"\r\n\r\n")[2] for part in got.split(b"HTTP/1.1 200 OK")[1:]] == [b"first", b"other"]


def test_what_is_no_http_gets_an_answer() -> None:
    assert b"400 Bad Request" in answers_to(b"this is not HTTP\r\n\r\n")
    again = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nnor this\r\n\r\n"
    assert b"400 Bad Request" in answers_to(again)
