"""uvicorn's HTTP protocol with a bound on what comes before the body: its parser collects headers without one."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; what arrives in one read with their end is not counted."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers do not end."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("Request headers are too large.")
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()
