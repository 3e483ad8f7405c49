"""A plain GET on the bootstrap port, as health checks send it."""

from __future__ import annotations

METHODS = (b"GET ", b"HEAD ")
MAX_HEAD = 8 * 2**10


def may_be_http(data: bytes | bytearray) -> bool:
    """Return whether a connection begins as HTTP does, as far as it has come. As the length of a frame that would be
    more than a gigabyte.
    """
    return any(data.startswith(method) or method.startswith(data) for method in METHODS)


def answer(data: bytes) -> bytes | None:
    """Return what is to be sent before the connection is closed, or None until the request's head is whole."""
    if b"\r\n\r\n" not in data:
        return _answer(431, "Request Header Fields Too Large", b"") if len(data) > MAX_HEAD else None
    method, _, rest = data.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path != b"/health":
        return _answer(404, "Not Found", b"this port is for decode servers; GET /health is answered\n")
    return _answer(200, "OK", b"" if method == b"HEAD" else b"ok\n")


def _answer(status: int, text: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} {text}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
