"""What readers and sources of staged reads say to each other.

The reader says hello with the token of the source's description, and is welcomed. Then it sends, without waiting::

    order    b"G", then a request (requests.py): collect these pieces in a block
    return   b"F", u64 number: the block of that order has been read, and is needed no more

and to each of them comes one answer, in any order::

    answer   u64 number, u32 status, u32 block

A reader gives growing numbers to its orders, and has at most AT_ONCE of them that are not settled: from the order to
the answer to its return. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct

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
