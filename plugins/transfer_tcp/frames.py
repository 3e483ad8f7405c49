"""What travels on a data connection.

The reader says hello with the token of the source's description, and is welcomed. Then it asks, as often as it likes,
without waiting for answers::

    request   u64 number, u64 lease, u64 total, u32 n, then int64 [n] offsets, int64 [n] lengths, int32 [n] regions
    answer    u64 number, u64 status, u64 total; with the status OK `total` bytes follow, then u64 number, u64 status

The second status says whether the lease held until the last byte was read. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct

import numpy as np

from pegboard.core.interfaces.kv_transfer import Ranges, TransferError

MAGIC = b"PBKVTCP1"
TOKEN = 32
HELLO = len(MAGIC) + TOKEN
REQUEST = struct.Struct("<QQQI")
ANSWER = struct.Struct("<QQQ")
END = struct.Struct("<QQ")
MAX_RANGES = 2**20
"""Pieces of a request."""
MAX_TOTAL = 2**40
"""Bytes of a request."""
RANGE = 20
"""Bytes that a piece takes in a request."""

_DESCRIPTION = struct.Struct(f"<{len(MAGIC)}sH{TOKEN}s")
_WORD = 2**64 - 1


class Status(enum.IntEnum):
    """What the source says of a request."""

    OK = 0
    ENDED = 1
    """The lease is not there, or not any more."""
    BEYOND = 2
    """Pieces are not within the regions."""


REASONS = {
    Status.ENDED: "the lease has ended",
    Status.BEYOND: "the source of a read is beyond the peer's regions",
}


class BadFrame(Exception):
    """What has come is not what may come here; the connection is closed."""


def pack_description(port: int, token: bytes) -> bytes:
    """Return what a peer needs to connect."""
    return _DESCRIPTION.pack(MAGIC, port, token)


def unpack_description(description: bytes) -> tuple[int, bytes]:
    """Return port and token. Raises TransferError."""
    if len(description) == _DESCRIPTION.size:
        magic, port, token = _DESCRIPTION.unpack(description)
        if magic == MAGIC and port:
            return port, token
    raise TransferError(f"{bytes(description[:40])!r} does not describe a server that is read from over TCP")


def lease_word(lease: int) -> int:
    """Return a lease as it travels."""
    return lease & _WORD


def pack_request(number: int, lease: int, ranges: Ranges) -> bytes:
    """Return a request for pieces of the peer's regions."""
    return b"".join(
        (
            REQUEST.pack(number, lease_word(lease), ranges.total, len(ranges)),
            ranges.offset.astype("<i8", copy=False).tobytes(),
            ranges.nbytes.astype("<i8", copy=False).tobytes(),
            ranges.region.astype("<i4", copy=False).tobytes(),
        )
    )


def unpack_ranges(data: bytearray, count: int, total: int) -> Ranges:
    """Return the pieces that follow a request's header. Raises BadFrame where they have another number of bytes."""
    ranges = Ranges(
        region=np.frombuffer(data, "<i4", count, 16 * count),
        offset=np.frombuffer(data, "<i8", count),
        nbytes=np.frombuffer(data, "<i8", count, 8 * count),
    )
    lengths = ranges.nbytes
    if count and not 1 <= int(lengths.min()) <= int(lengths.max()) <= total:
        raise BadFrame("pieces without bytes, or with more than all")
    if ranges.total != total:
        raise BadFrame(f"{ranges.total} bytes instead of {total}")
    return ranges
