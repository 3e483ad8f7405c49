"""Reads of rooms: what is announced is brought into seats, in the order in which it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.kv_transfer import TransferError, TransferState
from pegboard.plugins.disagg.decode_room import DecodeRoom, Piece
from pegboard.plugins.disagg.messages import dp_rank
from pegboard.plugins.disagg.ranges import SlotParts, ranges_of
from pegboard.plugins.disagg.shares import shares

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_transfer import KVTransfer, Ranges
    from pegboard.plugins.disagg.shares import Heads, Layout, Plan, Share

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
    """How a rank of a prefill server is read from, and how many reads of it are under way. `anew`: one has failed, so
    it is connected to again.
    """

    host: str
    description: bytes
    reads: int = 0
    anew: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank of a prefill server gives of each slot, and where in the slots here it belongs."""

    rank: int
    there: SlotParts
    here: SlotParts


@dataclass(frozen=True, slots=True)
class _Server:
    """A prefill server: the shares of its ranks, which are `size` in each of its data-parallel ranks."""

    parts: tuple[_Part, ...]
    size: int
    dp_size: int


class Reader:
    """The transfer engine of a rank, with what is under way. Each piece of a room is read in as many reads as the plan
    has shares, and is here once all of them are.
    """

    def __init__(self, transfer: KVTransfer, layout: Layout, most_bytes: int, plan: Plan = shares) -> None:
        self._transfer = transfer
        self._layout, self._plan = layout, plan
        self._token_bytes = sum(layout.slot_bytes)
        self._most_bytes = most_bytes
        self._reads: dict[int, _Read] = {}
        self._servers: dict[bytes, _Server] = {}
        self._sources: dict[str, _Source] = {}
        """By name of the engine's peer: instance and rank."""
        self._unsafe: dict[str, set[int]] = {}
        """Reads that may still write to seats whose requests are gone, by rid."""
        self._safe: list[str] = []
        self.bytes_begun = 0

    @property
    def quarantined(self) -> int:
        """Seats that are out of use because they may still be written to."""
        return len(self._unsafe)

    @property
    def under_way(self) -> int:
        return len(self._reads)

    # ---- sources --------------------------------------------------------------------------------------------------

    def meet(self, instance: bytes, host: str, descriptions: Sequence[bytes], dp_size: int = 1) -> None:
        """Get to know a prefill server, by what each of its ranks says. Raises TransferError where a description is
        not one, or heads cannot be dealt out to so many ranks.
        """
        if instance in self._servers:
            return
        size = len(descriptions) // dp_size
        try:
            parts = tuple(self._part(share, size) for share in self._plan(self._layout, size))
        except ValueError as error:
            raise TransferError(str(error)) from error
        read = {start + part.rank for start in range(0, len(descriptions), size) for part in parts}
        self._servers[instance] = _Server(parts, size, dp_size)
        try:
            for rank in sorted(read):
                source = self._sources[_peer(instance, rank)] = _Source(host, descriptions[rank])
                self._connect(_peer(instance, rank), source)
        except TransferError:
            self._forget(instance)
            raise

    def keep(self, instances: Iterable[bytes]) -> None:
        """Forget all prefill servers but these: they run no more."""
        named = set(instances)
        for instance in [instance for instance in self._servers if instance not in named]:
            self._forget(instance)

    def _forget(self, instance: bytes) -> None:
        server = self._servers.pop(instance)
        for peer in (_peer(instance, rank) for rank in range(server.size * server.dp_size)):
            if self._sources.pop(peer, None) is not None:
                self._transfer.disconnect(peer)

    def _part(self, share: Share, size: int) -> _Part:
        there = self._layout.slot_bytes_of(size)
        return _Part(share.rank, self._bytes(share.there, there), self._bytes(share.here, self._layout.slot_bytes))

    def _bytes(self, heads: Sequence[Heads], slot_bytes: tuple[int, ...]) -> SlotParts:
        pairs = list(zip(heads, self._layout.head_bytes, strict=True))
        return SlotParts(
            slot_bytes, tuple(one.first * each for one, each in pairs), tuple(one.stop * each for one, each in pairs)
        )

    # ---- reads ----------------------------------------------------------------------------------------------------

    def begin(self, rooms: Iterable[DecodeRoom]) -> None:
        """Begin what can be read now. Raises TransferError, and ValueError, where the engine refuses."""
        for room in rooms:
            while self._may_begin(room) and self._fits(room):
                self._read(room)

    def _may_begin(self, room: DecodeRoom) -> bool:
        if room.seat is None or room.stale or room.void or room.failure is not None:
            return False
        under_way = sum(bool(piece.handles) for piece in room.pieces)
        return under_way < AT_ONCE and room.begun < room.source.shape[0]

    def _fits(self, room: DecodeRoom) -> bool:
        used = sum(read.nbytes for read in self._reads.values() if read.room is not None)
        return not used or used + self._size(room) * self._token_bytes <= self._most_bytes

    def _size(self, room: DecodeRoom) -> int:
        most = max(1, self._most_bytes // PARTS // self._token_bytes)
        return min(int(room.source.shape[0]) - room.begun, most)

    def _read(self, room: DecodeRoom) -> None:
        assert room.seat is not None
        start, stop = room.begun, room.begun + self._size(room)
        server = self._servers[room.instance]
        first = dp_rank(room.key.room, server.dp_size) * server.size
        piece = Piece(start, stop)
        room.pieces.append(piece)
        room.begun = stop
        try:
            for part in server.parts:
                here = ranges_of(room.seat.slots[start:stop], part.here)
                there = ranges_of(room.source[start:stop], part.there)
                piece.handles.add(self._begin(room, _peer(room.instance, first + part.rank), there, here))
        except Exception:
            self.abandon(room)
            raise

    def _begin(self, room: DecodeRoom, peer: str, there: Ranges, here: Ranges) -> int:
        source = self._source(peer)
        handle = self._transfer.read(peer, room.lease, there, here)
        source.reads += 1
        self._reads[handle] = _Read(room, source, here.total)
        self.bytes_begun += here.total
        return handle

    def _source(self, peer: str) -> _Source:
        source = self._sources[peer]
        if source.anew and not source.reads:
            self._transfer.disconnect(peer)
            self._connect(peer, source)
            source.anew = False
        return source

    def _connect(self, peer: str, source: _Source) -> None:
        """Let the engine connect. Raises TransferError, whatever the engine raises: it may have no descriptors left."""
        try:
            self._transfer.connect(peer, source.host, source.description)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def abandon(self, room: DecodeRoom) -> None:
        """Let go of everything that is being read for a room. Its seat is written to until it has no handles."""
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
        any more, since a piece without one of its shares is none.
        """
        for piece in room.pieces:
            piece.handles.discard(handle)
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
        """Let go of a room whose request is gone. Return whether its seat may still be written to: `safe` tells then
        when it is not any more.
        """
        self.abandon(room)
        if room.handles:
            self._unsafe[room.rid] = set(room.handles)
        return bool(room.handles)

    def safe(self) -> list[str]:
        """Return the rids whose seats are written to no more, once."""
        safe, self._safe = self._safe, []
        return safe

    def forget(self, rid: str) -> None:
        self._unsafe.pop(rid, None)
        self._safe = [one for one in self._safe if one != rid]


def _peer(instance: bytes, rank: int) -> str:
    """Return what the engine knows a rank of a run of a server by."""
    return f"{instance.hex()}/{rank}"
