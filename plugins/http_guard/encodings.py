"""Request bodies that come packed (Content-Encoding): unpacked as they arrive, in pieces, so that the limits of bodies
count what was packed and no small body becomes a large one in memory first.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Message, Receive

PIECE = 64 * 1024
"""Most bytes that are unpacked at once."""
MAX_WINDOW_LOG = 23
"""The window of zstd that HTTP allows: 8 MiB (RFC 9659)."""
SMALL_MEMBER = 1024
"""Bytes below which a member has brought next to nothing: making its unpacker costs more."""
MAX_SMALL_MEMBERS = 1024
"""Most of these that a body may have."""


class _Decompressor(Protocol):
    """What zlib's and zstd's decompressors have in common: one member of gzip, or one frame of zstd."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Unpacker:
    """One member of gzip, or one frame of zstd."""

    def __init__(self, inner: _Decompressor, max_window: int) -> None:
        self._inner = inner
        self.max_window = max_window
        """Most bytes of what it has unpacked that it keeps in memory, to refer to."""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def unpack(self, data: bytes) -> bytes:
        """Return at most PIECE bytes more; what is left of `data` is kept for the next call."""
        # zlib hands back what it has not read, zstd keeps it.
        left: bytes = getattr(self._inner, "unconsumed_tail", b"")
        return self._inner.decompress(left + data, PIECE)


def _gzip() -> _Unpacker:
    return _Unpacker(zlib.decompressobj(wbits=31), 2**15)


def _zstd() -> _Unpacker:
    from backports import zstd

    inner = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})
    return _Unpacker(inner, 2**MAX_WINDOW_LOG)


_KINDS: Mapping[bytes, Callable[[], _Unpacker]] = {b"gzip": _gzip, b"x-gzip": _gzip, b"zstd": _zstd}


def encoding_of(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return how a body is packed; None for one that is not. Raises InvalidRequest (415) for ways that are not
    known.
    """
    said = b",".join(value for name, value in headers if name == b"content-encoding")
    kinds = [kind for one in said.lower().split(b",") if (kind := one.strip()) not in (b"", b"identity")]
    if not kinds:
        return None
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        message = f"content-encoding {said.decode('latin-1')[:64]!r} is not understood; gzip and zstd are"
        raise InvalidRequest(message, status=415, code="unknown_encoding")
    return kinds[0]


class Unpacked:
    """The messages of a request whose body is packed, as if it were not. `most` is how many bytes of it may arrive."""

    def __init__(self, receive: Receive, kind: bytes, most: int) -> None:
        self._receive = receive
        self._make = _KINDS[kind]
        self._name = kind.decode()
        self._most = most
        self._member: _Unpacker | None = None
        """The one that is open. It has memory of its own, so none is kept when the body is over, however it ends."""
        self._given = 0
        """What the member that is open has unpacked."""
        self._arrived = 0
        self._small = 0
        self._full = False
        """Whether the member may have more to give of what it has."""
        self._waiting = b""
        """What arrived and has not been given to a member yet."""
        self._more = True
        self._ended = False

    @property
    def window(self) -> int:
        """Bytes of memory that unpacking holds at most: of what is unpacked, as much as may be referred to."""
        return 0 if self._member is None else min(self._given, self._member.max_window)

    async def receive(self) -> Message:
        """Return the next message, with PIECE bytes of body at most. Raises InvalidRequest (400) for what is not
        unpacked, and (413) for more than may arrive.
        """
        try:
            message = await self._next()
        except Exception:
            self._member = None
            raise
        if message["type"] != "http.request":
            self._member = None
        return message

    async def _next(self) -> Message:
        if self._ended:
            return await self._receive()
        while not (self._full or self._waiting):
            if not self._more:
                self._ended = True
                if self._member is not None:
                    raise InvalidRequest(f"the body ends in the middle of its {self._name}", code="bad_encoding")
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting, self._more = message.get("body", b""), message.get("more_body", False)
            self._arrived += len(self._waiting)
            if self._arrived > self._most:
                raise too_large(self._most)
        piece = self._unpack()
        # What is unpacked of one piece from the network may be much, and takes time.
        await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": True}

    def _unpack(self) -> bytes:
        data, self._waiting = self._waiting, b""
        piece, problem = b"", ""
        try:
            if self._member is None:
                self._member, self._given = self._make(), 0
            piece = self._member.unpack(data)
        except Exception as error:
            # Raised in here, the refusal would keep this error, and that the member.
            problem = str(error) or type(error).__name__
        if self._member is None or problem:
            raise InvalidRequest(f"the body is not a valid {self._name}: {problem}", code="bad_encoding")
        self._given += len(piece)
        if not self._member.eof:
            self._full = len(piece) == PIECE
            return piece
        self._full, self._waiting, self._member = False, self._member.unused_data, None
        self._small += self._given < SMALL_MEMBER
        if self._small > MAX_SMALL_MEMBERS:
            message = f"the body is packed in more than {MAX_SMALL_MEMBERS} pieces of less than {SMALL_MEMBER} bytes"
            raise InvalidRequest(message, status=413, code="body_too_large")
        return piece
