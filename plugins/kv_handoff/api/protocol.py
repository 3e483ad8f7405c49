"""What readers and sources of pieces say to each other. All numbers are little-endian.

A request for pieces of a source's regions, as `tcp` sends it, and an order for staging::

    request  u64 number, u64 lease, u64 total, u32 n, then int64 [n] offsets, int64 [n] lengths, int32 [n] regions

With staging, the reader says hello with the token of the source's description, and is welcomed. Then it sends, without
waiting::

    order    b"G", then a request: collect these pieces in a block
    return   b"F", u64 number: the block of that order has been read, and is needed no more

and to each of them comes one answer, in any order::

    answer   u64 number, u32 status, u32 block

A reader gives growing numbers to its orders, and has at most AT_ONCE of them that are not settled: from the order to
the answer to its return.
"""

from __future__ import annotations

import enum
import struct

import numpy as np

from pegboard.plugins.kv_handoff.api.transfer import Ranges

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


MAGIC = b"PBKVSTG1"
ORDER, RETURN = b"G", b"F"
NUMBER = struct.Struct("<Q")
ANSWER = struct.Struct("<QII")
AT_ONCE = 4
"""Orders of a reader that are not settled: one is collected, one read, one dealt out, and one waits."""
MOST_PIECES = 2**16
"""Pieces of an order."""


class Status(enum.IntEnum):
    """What the source says of an order, or of its return."""

    READY = 0
    """All pieces are in the block, one after the other, and stay there until its return, or until RECALLED."""
    ENDED = 1
    """The lease is not there, or not any more."""
    BEYOND = 2
    """Pieces are not within the regions."""
    RETURNED = 3
    """The block has been the order's up to now: what was read out of it is right."""
    RECALLED = 4
    """It has not: it was taken back before."""
    FAILED = 5
    """The source cannot collect it, and its log says why."""


REASONS = {
    Status.ENDED: "the lease has ended",
    Status.BEYOND: "the source of a read is beyond the peer's regions",
    Status.FAILED: "the peer cannot collect the pieces of a read",
    Status.RECALLED: "the peer has taken its block back before it was read",
}
