"""Frames: a length of four bytes, big-endian, and as many bytes."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct(">I")


class FrameTooLong(Exception):
    """A frame claims more bytes than are taken."""


def framed(body: bytes) -> bytes:
    """Return a frame with this body."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames. It keeps what has come and makes no room for what is only claimed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes of a body at most. May be raised between two frames."""
        self._data = bytearray()

    @property
    def partial(self) -> bool:
        """Whether part of a frame has come."""
        return bool(self._data)

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._data += data

    def next(self) -> bytes | None:
        """Return the next whole body, or None until more has come. Raises FrameTooLong as soon as its length says so;
        nothing can be read after that.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.limit:
            raise FrameTooLong(f"a frame of {length} bytes, and {self.limit} are taken here")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body
