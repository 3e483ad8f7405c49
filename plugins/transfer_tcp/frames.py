"""What travels on a data connection.

The reader says hello with the token of the source's description, and is welcomed. Then it asks, as often as it likes,
without waiting for answers. Requests are those of the toolkit (`requests.py`)::

    answer    u64 number, u64 status, u64 total; with the status OK `total` bytes follow, then u64 number, u64 status

The second status says whether the lease held until the last byte was read. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct

from pegboard.plugins.kv_handoff.api.listening import TOKEN
from pegboard.plugins.kv_handoff.api.transfer import TransferError

MAGIC = b"PBKVTCP1"
HELLO = len(MAGIC) + TOKEN
ANSWER = struct.Struct("<QQQ")
END = struct.Struct("<QQ")
MAX_RANGES = 2**20
"""Pieces of a request."""
MAX_TOTAL = 2**40
"""Bytes of a request."""

_DESCRIPTION = struct.Struct(f"<{len(MAGIC)}sH{TOKEN}s")


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
