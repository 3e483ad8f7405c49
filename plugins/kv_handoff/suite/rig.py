"""What the suite of KV transfers works with: servers with memory of their own, and pieces of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pegboard.plugins.kv_handoff.api.transfer import (
    KVTransfer,
    KVTransferContext,
    Ranges,
    Region,
    TransferNews,
    TransferState,
)

GUARD = 64
"""Bytes before and after each region: they must stay as they are."""
LEASE = 7
Piece = tuple[int, int, int]
"""Region, offset, bytes."""


def ranges(pieces: Iterable[Piece]) -> Ranges:
    """Return pieces as arrays."""
    table = np.array(list(pieces), np.int64).reshape(-1, 3)
    return Ranges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


def pages(regions: int, slots: Sequence[int], slot_bytes: int) -> Ranges:
    """Return these slots of the first regions, region after region, as one who moves KV asks for them."""
    return ranges((region, slot * slot_bytes, slot_bytes) for region in range(regions) for slot in slots)


def recut(pieces: Sequence[Piece], lengths: Iterable[int]) -> list[Piece]:
    """Return the same bytes in the same order, in pieces of at most these lengths."""
    found, limits = [], iter(lengths)
    for region, offset, nbytes in pieces:
        end = offset + nbytes
        while offset < end:
            step = min(next(limits, nbytes), end - offset)
            found.append((region, offset, step))
            offset += step
    return found


class Server:
    """An engine and its memory: regions of random bytes, each between guards."""

    def __init__(self, sizes: Sequence[int], build: Callable[[KVTransferContext], KVTransfer], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._whole = [self._random.integers(0, 256, size + 2 * GUARD, np.uint8) for size in sizes]
        self.regions = [one[GUARD:-GUARD] for one in self._whole]
        self._guards = self._guard_bytes()
        self.engine = build(KVTransferContext(tuple(_region(one) for one in self.regions)))
        self.ended: dict[int, TransferNews] = {}
        """What has been told of each read."""

    def connect(self, other: Server, name: str = "peer") -> None:
        """Get to know another server."""
        self.engine.connect(name, "127.0.0.1", other.engine.describe())

    def read(self, source: Ranges, target: Ranges, *, peer: str = "peer", lease: int = LEASE) -> int:
        """Begin a read."""
        return self.engine.read(peer, lease, source, target)

    def poll(self) -> None:
        """Ask once for what has ended; each end must be told once."""
        for news in self.engine.poll():
            assert news.handle not in self.ended, f"the end of read {news.handle} is told twice"
            assert isinstance(news.state, TransferState)
            assert isinstance(news.reason, str)
            self.ended[news.handle] = news

    def wait(self, handles: Iterable[int], patience: float) -> list[TransferState]:
        """Poll until these reads have ended; return how."""
        wanted, end = list(handles), time.monotonic() + patience
        while not all(one in self.ended for one in wanted):
            assert time.monotonic() < end, f"reads that have not ended after {patience:g} s"
            self.poll()
            time.sleep(0.0005)
        return [self.ended[one].state for one in wanted]

    def bytes_at(self, some: Ranges) -> NDArray[np.uint8]:
        """Return the bytes of pieces, one after the other."""
        places = zip(some.region.tolist(), some.offset.tolist(), some.nbytes.tolist(), strict=True)
        found = [self.regions[region][offset : offset + nbytes] for region, offset, nbytes in places]
        return np.concatenate(found) if found else np.zeros(0, np.uint8)

    def copy(self) -> list[NDArray[np.uint8]]:
        """Return the regions as they are now."""
        return [one.copy() for one in self.regions]

    def renew(self) -> None:
        """Write other bytes everywhere: none stays as it was."""
        for one in self.regions:
            one += np.uint8(self._random.integers(1, 255))

    def check_guards(self) -> None:
        """Fail where bytes beside a region have changed."""
        assert self._guard_bytes() == self._guards, "bytes beside a region have changed"

    def _guard_bytes(self) -> bytes:
        return b"".join(one[:GUARD].tobytes() + one[-GUARD:].tobytes() for one in self._whole)


def _region(memory: NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes, slot_bytes=1, heads=1, buffer=memory.data)


@dataclass
class Expected:
    """A target's memory as it has to be after some reads."""

    memory: list[NDArray[np.uint8]]

    def fill(self, target: Ranges, data: NDArray[np.uint8]) -> None:
        """Write the pieces of a target."""
        begin = 0
        for region, offset, nbytes in zip(
            target.region.tolist(), target.offset.tolist(), target.nbytes.tolist(), strict=True
        ):
            self.memory[region][offset : offset + nbytes] = data[begin : begin + nbytes]
            begin += nbytes

    def check(self, server: Server) -> None:
        """Fail where a byte is another one."""
        for number, (wanted, found) in enumerate(zip(self.memory, server.regions, strict=True)):
            wrong = np.flatnonzero(wanted != found)
            assert not len(wrong), f"{len(wrong)} bytes of region {number} are wrong, the first one at {wrong[0]}"
        server.check_guards()
