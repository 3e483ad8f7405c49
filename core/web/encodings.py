"""Request bodies that come packed (Content-Encoding): unpacked as they arrive, in pieces, so that the limits of bodies
count what was packed and no small body becomes a large one in memory first.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Message, Receive

PIECE = 64 * 1024
"""Most bytes that are unpacked at once."""
MAX_WINDOW_LOG = 23
"""The window of zstd that HTTP allows: 8 MiB (RFC 9659)."""


class _Unpacker(Protocol):
    """One member of gzip, or one frame of zstd."""

    eof: bool
    unused_data: bytes

    def unpack(self, data: bytes) -> bytes:
        """At most PIECE bytes more; what is left of `data` is kept for the next call."""
        ...


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def unpack(self, data: bytes) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, PIECE)


class _Zstd:
    def __init__(self) -> None:
        from backports import zstd

        self._inner = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def unpack(self, data: bytes) -> bytes:
        return self._inner.decompress(data, PIECE)


_KINDS: Mapping[bytes, Callable[[], Any]] = {b"gzip": _Gzip, b"x-gzip": _Gzip, b"zstd": _Zstd}


def encoding_of(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """How a body is packed; None for one that is not. Raises InvalidRequest (415) for ways that are not known."""
    said = b",".join(value for name, value in headers if name == b"content-encoding")
    kinds = [kind for one in said.lower().split(b",") if (kind := one.strip()) not in (b"", b"identity")]
    if not kinds:
        return None
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        message = f"content-encoding {said.decode('latin-1')[:64]!r} is not understood; gzip and zstd are"
        raise InvalidRequest(message, status=415, code="unknown_encoding")
    return kinds[0]


class Unpacked:
    """The messages of a request whose body is packed, as if it were not."""

    def __init__(self, receive: Receive, kind: bytes) -> None:
        self._receive = receive
        self._make = _KINDS[kind]
        self._name = kind.decode()
        self._member: _Unpacker = self._make()
        self._fed = False
        """Whether the member has been given anything."""
        self._full = False
        """Whether the member may have more to give of what it has."""
        self._waiting = b""
        """What arrived and has not been given to a member yet."""
        self._more = True
        self._ended = False

    async def receive(self) -> Message:
        """The next message, with PIECE bytes of body at most. Raises InvalidRequest (400) for what is not unpacked."""
        if self._ended:
            return await self._receive()
        while not (self._full or self._waiting):
            if not self._more:
                self._ended = True
                if self._fed and not self._member.eof:
                    raise InvalidRequest(f"the body ends in the middle of its {self._name}", code="bad_encoding")
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting, self._more = message.get("body", b""), message.get("more_body", False)
        data, self._waiting = self._waiting, b""
        try:
            if self._member.eof:
                self._member, self._fed = self._make(), False
            piece = self._member.unpack(data)
        except Exception as error:
            raise InvalidRequest(f"the body is no valid {self._name}: {error}", code="bad_encoding") from None
        self._fed = True
        if self._member.eof:
            self._full, self._waiting = False, self._member.unused_data
        else:
            self._full = len(piece) == PIECE
        # What is unpacked of one piece from the network may be much, and takes time.
        await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": True}
