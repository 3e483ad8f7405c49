"""Pieces of memory as a stream: what to send next, and where what comes goes to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pegboard.plugins.kv_handoff.api.pieces import LARGE_PIECE, Memory, Pieces

CHUNK = 2**20
"""Bytes that are gathered or dealt out at a time."""
MOST_BUFFERS = 1024
"""Buffers of a system call, IOV_MAX of Linux."""


def beyond(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after their first `count` bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    left = buffers[done:]
    if count:
        left[0] = left[0][count:]
    return left


def new_buffer() -> memoryview:
    """Return memory for a chunk."""
    return np.empty(CHUNK, np.uint8).data


class Chunks:
    """The chunks of a stream. Large pieces are sent from and received into their own place; of small ones, which would
    take a buffer each, a chunk is collected in `buffer`.
    """

    def __init__(self, memory: Memory, pieces: Pieces, buffer: memoryview) -> None:
        self._memory = memory
        self._pieces = pieces
        self._buffer = buffer
        self._large = pieces.total >= LARGE_PIECE * len(pieces.ranges)
        self._cuts = pieces.cuts(CHUNK, MOST_BUFFERS if self._large else CHUNK)

    def next_filled(self) -> list[memoryview]:
        """Return the bytes of the next chunk, from the memory as it is now; none after the last one."""
        cut = next(self._cuts, None)
        if cut is None:
            return []
        part = self._pieces.part(*cut)
        if self._large:
            return self._memory.pieces(part)
        place = self._buffer[: cut[1] - cut[0]]
        self._memory.gather(part, np.frombuffer(place, np.uint8))
        return [place]

    def next_empty(self) -> Filling | None:
        """Return the next chunk to be filled; None after the last one."""
        cut = next(self._cuts, None)
        if cut is None:
            return None
        part = self._pieces.part(*cut)
        if self._large:
            return Filling(self._memory.pieces(part), None)
        place = self._buffer[: cut[1] - cut[0]]
        return Filling([place], lambda: self._memory.scatter(part, np.frombuffer(place, np.uint8)))


class Filling:
    """A chunk that is being received. `buffers` are where its next bytes go to."""

    def __init__(self, buffers: list[memoryview], deal: Callable[[], None] | None) -> None:
        self.buffers = buffers
        self._deal = deal

    def advance(self, count: int) -> bool:
        """Take note of `count` bytes; return whether the chunk is complete, and in its place."""
        self.buffers = beyond(self.buffers, count)
        if self.buffers:
            return False
        if self._deal is not None:
            self._deal()
        return True
