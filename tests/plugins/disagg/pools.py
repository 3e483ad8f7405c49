"""Pools of KV, and engines that read between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.events import Address
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.kv_handoff.api import KVReservation
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, KVTransferContext, Region
from pegboard.plugins.transfer_inproc.options import InprocOptions
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer
from pegboard.plugins.transfer_mooncake.options import MooncakeTransferOptions
from pegboard.plugins.transfer_mooncake.transfer import MooncakeTransfer
from pegboard.plugins.transfer_nixl.options import NixlOptions
from pegboard.plugins.transfer_nixl.transfer import NixlTransfer
from pegboard.plugins.transfer_tcp.options import TcpOptions
from pegboard.plugins.transfer_tcp.transfer import TcpTransfer

HEAD_COUNTS, HEAD_BYTES = (4, 2, 4, 8), (16, 16, 40, 8)
SLOT_BYTES = tuple(heads * each for heads, each in zip(HEAD_COUNTS, HEAD_BYTES, strict=True))
SLOTS, TOKENS, LEASE, INSTANCE = 64, 40, 77, b"instance"


class Pool:
    """A pool and its engine."""

    def __init__(self, build: Callable[[KVTransferContext], KVTransfer], seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.buffers = [draw.integers(0, 256, SLOTS * each, np.uint8) for each in SLOT_BYTES]
        regions = tuple(
            Region(buffer.ctypes.data, buffer.nbytes, slot_bytes, heads, buffer=buffer.data)
            for buffer, slot_bytes, heads in zip(self.buffers, SLOT_BYTES, HEAD_COUNTS, strict=True)
        )
        self.engine = build(KVTransferContext(regions))

    def kept(self, region: int, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return what slots of a region hold: [tokens, bytes]."""
        return self.buffers[region].reshape(SLOTS, -1)[slots]


def same(here: Pool, ours: NDArray[np.int32], there: Pool, theirs: NDArray[np.int32]) -> bool:
    """Return whether the slots `ours` hold what `theirs` do, in all regions."""
    return all(np.array_equal(here.kept(at, ours), there.kept(at, theirs)) for at in range(len(SLOT_BYTES)))


BUILD: dict[str, Callable[[KVTransferContext], KVTransfer]] = {
    "inproc": lambda ctx: InprocTransfer(InprocOptions(), ctx),
    "tcp": lambda ctx: TcpTransfer(TcpOptions(), ctx),
    "nixl": lambda ctx: NixlTransfer(NixlOptions(staging=2**27), ctx),
    "mooncake": lambda ctx: MooncakeTransfer(MooncakeTransferOptions(staging=2**27), ctx),
}


class Pools:
    """Makes pools of servers, and readers of those that decode."""

    def __init__(self) -> None:
        self.made: list[Pool] = []

    def make(self, engine: str) -> Pool:
        self.made.append(Pool(BUILD[engine], len(self.made)))
        return self.made[-1]

    def pair(self, engine: str) -> tuple[Pool, Pool]:
        """Return a source and a target."""
        return self.make(engine), self.make(engine)

    def reader(self, here: Pool, there: Pool, most_bytes: int = 2**20) -> Reader:
        """Return a reader that knows the server `there`."""
        reader = Reader(here.engine, SLOT_BYTES, most_bytes)
        reader.meet(INSTANCE, "127.0.0.1", there.engine.describe())
        there.engine.allow(LEASE)
        return reader


def slots_of(seed: int) -> NDArray[np.int32]:
    """Return TOKENS slots, in pages of four in any order."""
    pages = np.random.default_rng(seed).permutation(SLOTS // 4)[: TOKENS // 4]
    return (pages[:, None] * 4 + np.arange(4)).ravel().astype(np.int32)


def room_of(here: NDArray[np.int32], there: NDArray[np.int32], start: int = 0) -> DecodeRoom:
    """Return a room that is announced as a whole, and has memory."""
    room = DecodeRoom(RoomKey(1), "rid", Address("127.0.0.1", 1), len(here), b"", 1, INSTANCE, lease=LEASE)
    room.epoch, room.source = 0, there
    room.reserved(KVReservation(here, start, len(here)))
    return room


def read_all(readers: Sequence[tuple[Reader, DecodeRoom]], patience: float = 30.0) -> None:
    until = time.monotonic() + patience
    while any(room.here < room.length or room.stale for _, room in readers):
        assert time.monotonic() < until, [room.pieces for _, room in readers]
        for reader, room in readers:
            reader.begin([room])
            assert not reader.poll([room])
