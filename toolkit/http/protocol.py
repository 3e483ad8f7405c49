"""uvicorn's HTTP protocol, with what routes that stream need: a BodyWriter, and answers that HTTP/1.0 understands.
Requests that ask for another protocol are answered in this one.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pegboard.toolkit.http.answer_stream import BODY_WRITER

_MALFORMED = "Invalid HTTP request received."


class StreamingProtocol(HttpToolsProtocol):
    """Offers the extension BODY_WRITER, ends answers of unknown length with the connection for HTTP/1.0, and ignores
    the header Upgrade.
    """

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.feed(data)
        except httptools.HttpParserError:
            self.logger.warning(_MALFORMED)
            self.send_400_response(_MALFORMED)

    def feed(self, data: bytes) -> None:
        """Parse what has arrived. Raises HttpParserError for what is not HTTP.

        A request may ask for another protocol, and a server may answer it as if it had not (RFC 9110, 7.8): Java's
        client asks for HTTP/2 in each request without TLS. httptools takes what follows such a head for the other
        protocol. Its head is therefore parsed again, without the Upgrade, and then its body.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            if not self.to_be_parsed_again():
                # CONNECT: what follows is meant for another server, whatever it looks like.
                self.cycle.keep_alive = False
                return
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def to_be_parsed_again(self) -> bool:
        """Return whether the head that has just been parsed asks for another protocol, so that `feed` parses it once
        more. What is done on a complete head or message must wait for that.
        """
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([line, *headers, b"", b""])

    def on_headers_complete(self) -> None:
        if self.to_be_parsed_again():
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _end_with_the_connection(self.cycle)
        elif self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {BODY_WRITER: _BodyWriter(self.cycle)}
            self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        if not self.to_be_parsed_again():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # The writer knows the cycle, and the cycle its scope: a circle that would wait for the garbage collector.
        cycle: object = self.cycle
        if isinstance(cycle, RequestResponseCycle) and cycle.response_complete:
            cycle.scope.pop("extensions", None)
        super().on_response_complete()


class _BodyWriter:
    """What `RequestResponseCycle.send` does with a piece of a chunked body, without being awaited for each."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def gone(self) -> bool:
        return bool(self._cycle.disconnected)

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.disconnected:
            return True
        if not cycle.chunked_encoding or cycle.response_complete:
            raise RuntimeError("this response takes no pieces")
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        await self._cycle.flow.drain()


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """Have an answer of unknown length end where its connection does: a client of HTTP/1.0 knows no chunks, which
    uvicorn sends all the same.
    """
    send = cycle.send
    unknown = False

    async def sending(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unknown:
                cycle.chunked_encoding = False
        elif unknown:
            # uvicorn takes it for the rest of a length that was announced.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = sending  # type: ignore[method-assign]
