"""Which prompts prefill computes for decode servers, and in which order where their KV does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.plugins.disagg.prefill_room import PrefillRoom


class Held:
    """Rooms that are open, with at most `most` tokens together, and rooms that wait for these to be taken. Of those
    that wait the next is the first one of the key that has the fewest tokens open.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._open: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, PrefillRoom]] = {}
        """By key, and by rid in their order."""

    @property
    def tokens(self) -> int:
        """Tokens of all open rooms."""
        return sum(self._open.values())

    @property
    def waits(self) -> bool:
        """Whether a room waits."""
        return bool(self._waiting)

    def fits(self, room: PrefillRoom) -> bool:
        """Return whether there is room for its KV. One goes whatever its length."""
        tokens = self.tokens
        return not tokens or tokens + room.length <= self._most

    def open(self, room: PrefillRoom) -> None:
        """Let a room through."""
        self._leave(room)
        self._open[room.principal] += room.length
        room.open = True

    def wait(self, room: PrefillRoom) -> None:
        """Let a room wait, as the last one of its key."""
        self._waiting.setdefault(room.principal, {})[room.rid] = room

    def forget(self, room: PrefillRoom) -> None:
        """Note that a room has ended."""
        self._leave(room)
        if room.open:
            self._open[room.principal] -= room.length
            if not self._open[room.principal]:
                del self._open[room.principal]

    def next(self, asked: Container[str]) -> PrefillRoom | None:
        """Return the room that is let through next, of these rids."""
        firsts = (next((room for rid, room in rooms.items() if rid in asked), None) for rooms in self._waiting.values())
        found = [room for room in firsts if room is not None]
        return min(found, key=lambda room: (self._open[room.principal], room.lease), default=None)

    def gives_way(self, rooms: Iterable[PrefillRoom], other: PrefillRoom, before: float) -> PrefillRoom | None:
        """Return the room that gives way to another key's: it was computed `before`, no decode server has asked for it,
        and its key has more tokens open than the other one would have. None where there is none. Of several, the one
        of the key that has most, and of these the oldest.
        """
        least = self._open[other.principal] + other.length
        if max(self._open.values(), default=0) <= least:
            return None
        found = [
            (-self._open[room.principal], room.ended, room.lease, room)
            for room in rooms
            if room.ended is not None
            and room.ended <= before
            and room.question is None
            and not room.failed
            and self._open[room.principal] > least
        ]
        return min(found)[-1] if found else None

    def _leave(self, room: PrefillRoom) -> None:
        waiting = self._waiting.get(room.principal, {})
        waiting.pop(room.rid, None)
        if not waiting:
            self._waiting.pop(room.principal, None)
