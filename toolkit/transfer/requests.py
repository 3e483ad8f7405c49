"""Requests for pieces of a source's regions, as they travel: all numbers are little-endian.

request   u64 number, u64 lease, u64 total, u32 n, then int64 [n] offsets, int64 [n] lengths, int32 [n] regions
"""

from __future__ import annotations

import struct

import numpy as np

from pegboard.core.interfaces.kv_transfer import Ranges

REQUEST = struct.Struct("<QQQI")
RANGE = 20
"""Bytes that a piece takes in a request."""

_WORD = 2**64 - 1


class BadFrame(Exception):
    """What has come is not what may come here; the connection is closed."""


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
