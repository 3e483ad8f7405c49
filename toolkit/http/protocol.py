"""uvicorn's HTTP protocol, with what routes that stream need: a BodyWriter, and answers that HTTP/1.0 understands."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pegboard.toolkit.http.answer_stream import BODY_WRITER


class StreamingProtocol(HttpToolsProtocol):
    """Offers the extension BODY_WRITER, and ends answers of unknown length with the connection for HTTP/1.0."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _end_with_the_connection(self.cycle)
        elif self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {BODY_WRITER: _BodyWriter(self.cycle)}
            self.scope["extensions"] = extensions

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
