"""Virtual ranks: pools with a part of the heads each, and engines that read between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.admission_gate import Seat
from pegboard.core.interfaces.kv_transfer import KVTransfer, KVTransferContext, Region
from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.events import Address
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.disagg.shares import Layout
from pegboard.plugins.transfer_inproc.options import InprocOptions
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer
from pegboard.plugins.transfer_mooncake.options import MooncakeTransferOptions
from pegboard.plugins.transfer_mooncake.transfer import MooncakeTransfer
from pegboard.plugins.transfer_nixl.options import NixlOptions
from pegboard.plugins.transfer_nixl.transfer import NixlTransfer
from pegboard.plugins.transfer_tcp.options import TcpOptions
from pegboard.plugins.transfer_tcp.transfer import TcpTransfer

HEAD_COUNTS, HEAD_BYTES = (4, 2, 4, 8), (16, 16, 40, 8)
SLOTS, TOKENS, LEASE, INSTANCE = 64, 40, 77, b"instance"


class Rank:
    """A rank's pool and its engine."""

    def __init__(self, layout: Layout, build: Callable[[KVTransferContext], KVTransfer], seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.layout = layout
        self.buffers = [draw.integers(0, 256, SLOTS * each, np.uint8) for each in layout.slot_bytes]
        regions = tuple(
            Region(one.ctypes.data, one.nbytes, each, each // head_bytes, buffer=one.data)
            for one, each, head_bytes in zip(self.buffers, layout.slot_bytes, layout.head_bytes, strict=True)
        )
        self.engine = build(KVTransferContext(regions))

    def heads(self, region: int, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return [tokens, heads, bytes] of a region."""
        return self.buffers[region].reshape(SLOTS, -1, self.layout.head_bytes[region])[slots]


def whole(ranks: Sequence[Rank], region: int, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return all heads [tokens, heads, bytes] of a region: those of all ranks, where each has others."""
    return np.concatenate([one.heads(region, slots) for one in ranks], axis=1)


# More blocks than eight ranks have reads under way: where there are fewer some reads go straight.
BUILD: dict[str, Callable[[KVTransferContext], KVTransfer]] = {
    "inproc": lambda ctx: InprocTransfer(InprocOptions(), ctx),
    "tcp": lambda ctx: TcpTransfer(TcpOptions(), ctx),
    "nixl": lambda ctx: NixlTransfer(NixlOptions(staging=2**27), ctx),
    "mooncake": lambda ctx: MooncakeTransfer(MooncakeTransferOptions(staging=2**27), ctx),
}


class Ranks:
    """Makes the ranks of servers, and readers of those that decode."""

    def __init__(self) -> None:
        self.made: list[Rank] = []

    def make(self, size: int, engine: str) -> list[Rank]:
        layouts = [Layout(HEAD_COUNTS, HEAD_BYTES, rank, size) for rank in range(size)]
        made = [Rank(one, BUILD[engine], len(self.made) + number) for number, one in enumerate(layouts)]
        self.made += made
        return made

    def reader(self, here: Rank, there: Sequence[Rank], most_bytes: int = 2**20) -> Reader:
        """Return a reader that knows the server `there`."""
        reader = Reader(here.engine, here.layout, most_bytes)
        reader.meet(INSTANCE, "127.0.0.1", [one.engine.describe() for one in there])
        for one in there:
            one.engine.allow(LEASE)
        return reader


def slots_of(seed: int) -> NDArray[np.int32]:
    """Return TOKENS slots, in pages of four in any order."""
    pages = np.random.default_rng(seed).permutation(SLOTS // 4)[: TOKENS // 4]
    return (pages[:, None] * 4 + np.arange(4)).ravel().astype(np.int32)


def room_of(here: NDArray[np.int32], there: NDArray[np.int32], start: int = 0) -> DecodeRoom:
    """Return a room that is announced as a whole, and seated."""
    room = DecodeRoom(RoomKey(1), "rid", Address("127.0.0.1", 1), len(here), b"", 1, INSTANCE, lease=LEASE)
    room.epoch, room.source = 0, there
    room.seated(Seat(here, start, len(here)))
    return room


def read_all(readers: Sequence[tuple[Reader, DecodeRoom]], patience: float = 30.0) -> None:
    until = time.monotonic() + patience
    while any(room.here < room.length or room.stale for _, room in readers):
        assert time.monotonic() < until, [room.pieces for _, room in readers]
        for reader, room in readers:
            reader.begin([room])
            assert not reader.poll([room])
