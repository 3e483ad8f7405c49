"""Reads of rooms: what is announced is brought into reserved memory, in the order in which it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.plugins.disagg.decode_room import DecodeRoom, Piece
from pegboard.plugins.disagg.ranges import ranges_of
from pegboard.plugins.kv_handoff.api.transfer import TransferError, TransferState

if TYPE_CHECKING:
    from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, Ranges

AT_ONCE = 2
"""Pieces of one room that are under way at most."""
PARTS = 4
"""A piece takes this part of all bytes that may be under way at most."""


@dataclass(slots=True)
class _Read:
    """A read under way; `room` is None once it was abandoned."""

    room: DecodeRoom | None
    source: _Source
    nbytes: int


@dataclass(slots=True)
class _Source:
    """How a prefill server is read from, and how many reads of it are under way. `anew`: one has failed, so it is
    connected to again.
    """

    host: str
    description: bytes
    reads: int = 0
    anew: bool = False


class Reader:
    """The transfer engine, with what is under way. `slot_bytes` are those of a slot in each region of the pool."""

    def __init__(self, transfer: KVTransfer, slot_bytes: Sequence[int], most_bytes: int) -> None:
        self._transfer = transfer
        self._slot_bytes = tuple(slot_bytes)
        self._token_bytes = sum(slot_bytes)
        self._most_bytes = most_bytes
        self._reads: dict[int, _Read] = {}
        self._sources: dict[bytes, _Source] = {}
        """By instance of the prefill server."""
        self._unsafe: dict[str, set[int]] = {}
        """Reads that may still write to the memory of requests that are gone, by rid."""
        self._safe: list[str] = []
        self.bytes_begun = 0

    @property
    def quarantined(self) -> int:
        """Requests whose memory is out of use because it may still be written to."""
        return len(self._unsafe)

    @property
    def under_way(self) -> int:
        return len(self._reads)

    # ---- sources --------------------------------------------------------------------------------------------------

    def meet(self, instance: bytes, host: str, description: bytes) -> None:
        """Get to know a prefill server, by what its engine says of itself. Raises TransferError where that is not a
        description.
        """
        if instance in self._sources:
            return
        source = _Source(host, description)
        self._connect(instance, source)
        self._sources[instance] = source

    def keep(self, instances: Iterable[bytes]) -> None:
        """Forget all prefill servers but these: they run no more."""
        named = set(instances)
        for instance in [instance for instance in self._sources if instance not in named]:
            del self._sources[instance]
            self._transfer.disconnect(_peer(instance))

    # ---- reads ----------------------------------------------------------------------------------------------------

    def begin(self, rooms: Iterable[DecodeRoom]) -> None:
        """Begin what can be read now. Raises TransferError, and ValueError, where the engine refuses."""
        for room in rooms:
            while self._may_begin(room) and self._fits(room):
                self._read(room)

    def _may_begin(self, room: DecodeRoom) -> bool:
        if room.memory is None or room.stale or room.void or room.failure is not None:
            return False
        under_way = sum(piece.handle is not None for piece in room.pieces)
        return under_way < AT_ONCE and room.begun < room.source.shape[0]

    def _fits(self, room: DecodeRoom) -> bool:
        used = sum(read.nbytes for read in self._reads.values() if read.room is not None)
        return not used or used + self._size(room) * self._token_bytes <= self._most_bytes

    def _size(self, room: DecodeRoom) -> int:
        most = max(1, self._most_bytes // PARTS // self._token_bytes)
        return min(int(room.source.shape[0]) - room.begun, most)

    def _read(self, room: DecodeRoom) -> None:
        assert room.memory is not None
        start, stop = room.begun, room.begun + self._size(room)
        piece = Piece(start, stop)
        room.pieces.append(piece)
        room.begun = stop
        try:
            here = ranges_of(room.memory.slots[start:stop], self._slot_bytes)
            there = ranges_of(room.source[start:stop], self._slot_bytes)
            piece.handle = self._begin(room, there, here)
        except Exception:
            self.abandon(room)
            raise

    def _begin(self, room: DecodeRoom, there: Ranges, here: Ranges) -> int:
        source = self._source(room.instance)
        handle = self._transfer.read(_peer(room.instance), room.lease, there, here)
        source.reads += 1
        self._reads[handle] = _Read(room, source, here.total)
        self.bytes_begun += here.total
        return handle

    def _source(self, instance: bytes) -> _Source:
        source = self._sources[instance]
        if source.anew and not source.reads:
            self._transfer.disconnect(_peer(instance))
            self._connect(instance, source)
            source.anew = False
        return source

    def _connect(self, instance: bytes, source: _Source) -> None:
        """Let the engine connect. Raises TransferError, whatever the engine raises: it may have no descriptors left."""
        try:
            self._transfer.connect(_peer(instance), source.host, source.description)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def abandon(self, room: DecodeRoom) -> None:
        """Let go of everything that is being read for a room. Its memory is written to until it has no handles."""
        room.set_back()
        for handle in room.stale:
            read = self._reads[handle]
            if read.room is not None:
                read.room = None
                self._transfer.abandon(handle)

    def poll(self, rooms: Iterable[DecodeRoom]) -> list[tuple[DecodeRoom, str]]:
        """Take the ends of reads. Return the rooms that one has failed for, with the reason; what else was under way
        for these is abandoned.
        """
        failed = []
        for handle, state, reason in self._transfer.poll():
            read = self._reads.pop(handle, None)
            if read is None:
                continue
            read.source.reads -= 1
            read.source.anew |= state is TransferState.FAILED
            if read.room is None:
                self._ended(handle, rooms)
            elif self._landed(read.room, handle, state):
                failed.append((read.room, reason))
        return failed

    def _landed(self, room: DecodeRoom, handle: int, state: TransferState) -> bool:
        """Note the end of a read that counts. Return whether it has failed: then the room's other reads do not count
        any more.
        """
        for piece in room.pieces:
            if piece.handle == handle:
                piece.handle = None
        if state is TransferState.DONE:
            return False
        self.abandon(room)
        return True

    def _ended(self, handle: int, rooms: Iterable[DecodeRoom]) -> None:
        for room in rooms:
            room.stale.discard(handle)
        for rid, handles in list(self._unsafe.items()):
            handles.discard(handle)
            if not handles:
                del self._unsafe[rid]
                self._safe.append(rid)

    # ---- quarantine -----------------------------------------------------------------------------------------------

    def leave(self, room: DecodeRoom) -> bool:
        """Let go of a room whose request is gone. Return whether its memory may still be written to: `safe` tells then
        when it is not any more.
        """
        self.abandon(room)
        if room.handles:
            self._unsafe[room.rid] = set(room.handles)
        return bool(room.handles)

    def safe(self) -> list[str]:
        """Return the rids whose memory is written to no more, once."""
        safe, self._safe = self._safe, []
        return safe

    def forget(self, rid: str) -> None:
        self._unsafe.pop(rid, None)
        self._safe = [one for one in self._safe if one != rid]


def _peer(instance: bytes) -> str:
    """Return what the engine knows a run of a server by."""
    return instance.hex()
