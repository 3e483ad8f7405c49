"""What leader and followers tell each other over one socket per follower: msgspec structs, each after its length."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 64 * 2**20
"""A longer message ends the connection."""
_LENGTH = struct.Struct("<I")


class Place(msgspec.Struct, frozen=True):
    """What a follower is told at its start: its rank, and the number of its open socket."""

    index: int
    size: int
    file: int


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


class Step(_Message, frozen=True, tag=0):
    """A batch; see `delta` for `fields`."""

    fields: bytes


class Table(_Message, frozen=True, tag=1):
    """Changes of the row table; see `delta` for `runs`."""

    runs: tuple[bytes, bytes, bytes]


class Start(_Message, frozen=True, tag=2):
    """All have their weights: get KV memory of so many pages. The row table has so many rows of this width."""

    num_pages: int
    rows: int
    width: int


class Meet(_Message, frozen=True, tag=3):
    """All have memory: connect the communicator at this directory."""

    directory: str
    timeout: float


class MeetMachines(_Message, frozen=True, tag=9):
    """The same, where ranks are on several machines: rank 0 listens there."""

    host: str
    port: int
    timeout: float


class Sync(_Message, frozen=True, tag=4):
    """Say `Synced` once so many batches are computed, whatever follows them."""

    number: int


class Ping(_Message, frozen=True, tag=5):
    """Say `Pong`, whatever is under way."""


class Close(_Message, frozen=True, tag=6):
    """End."""


class Load(_Message, frozen=True, tag=7):
    """The rank is like the others: read weights."""


class Measure(_Message, frozen=True, tag=8):
    """All have their weights: say `Room`. So many ranks share the memory of a device."""

    sharing: int


class GoOn(_Message, frozen=True, tag=10):
    """Go on with the batch that has waited for longest for the last section: rank 0 does so now."""


class Done(_Message, frozen=True, tag=0):
    """The rank is there ("come"), has its weights ("load"), has memory ("start"), has met the others ("meet")."""

    what: str


class Synced(_Message, frozen=True, tag=1):
    number: int


class Pong(_Message, frozen=True, tag=2):
    pass


class Failed(_Message, frozen=True, tag=3):
    """What the follower cannot go on after. It ends. `temporary`: another start may mend it."""

    error: str
    temporary: bool = False


class Like(_Message, frozen=True, tag=4):
    """What is to be the same on all ranks, as it is there (`FollowersContext.facts`)."""

    facts: dict[str, str]


class Room(_Message, frozen=True, tag=5):
    """The rank has memory for so many pages of KV."""

    num_pages: int


ToFollower: TypeAlias = Step | Table | Start | Meet | MeetMachines | Sync | Ping | Close | Load | Measure | GoOn
ToLeader: TypeAlias = Done | Synced | Pong | Failed | Like | Room

to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
to_leader: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
encode = msgspec.msgpack.Encoder().encode


class LinkError(PegboardError):
    """What comes over a link is not a message."""


class Frames:
    """Cuts what has come over a stream into messages."""

    def __init__(self) -> None:
        self._left = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now. Raises LinkError for one that is too long."""
        self._left += data
        while len(self._left) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._left)
            if length > MAX_BYTES:
                raise LinkError(f"a message of {length} bytes, more than {MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._left) < end:
                return
            frame = bytes(self._left[_LENGTH.size : end])
            del self._left[:end]
            yield frame


class Link:
    """One end of a socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._frames = Frames()
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send an encoded message. Raises OSError where the other end is gone, and LinkError for too long a message."""
        if len(data) > MAX_BYTES:
            raise LinkError(f"a message of {len(data)} bytes, more than {MAX_BYTES}")
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def try_send(self, data: bytes) -> None:
        """Send a short message, unless another one is being sent, or the other end has not taken those before it.
        Raises OSError where the other end is gone.
        """
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(BlockingIOError):
                    self.socket.send(_LENGTH.pack(len(data)) + data, socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self) -> list[bytes] | None:
        """Wait for messages; None: the other end is closed. Raises LinkError and OSError."""
        data = self.socket.recv(2**16)
        return list(self._frames.add(data)) if data else None

    def close(self) -> None:
        """Close it; a thread that waits in `receive` sees the end of the stream."""
        with contextlib.suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
