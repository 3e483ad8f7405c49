"""An engine over a library within this process, which moves bytes when a test lets it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.linked_transfer import LinkedTransfer, Reach
from pegboard.plugins.kv_handoff.api.links import Limits, Part, Wire
from pegboard.plugins.kv_handoff.api.staging import Staging, StagingOptions
from pegboard.plugins.kv_handoff.api.staging_reader import StagingPlace
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, Ranges, Region, TransferError, TransferNews
from pegboard.plugins.kv_handoff.suite.rig import LEASE

KIND = b"toy"
SECONDS = 10.0
PATIENCE = 20.0
LIMITS = Limits(part_bytes=2**20, part_pieces=512, parts=8, seconds=SECONDS)
SIZE = 256 * 2**10
SLOT = 64
BLOCK = 2**14
"""Bytes of a block."""

_numbers = itertools.count()
_memories: dict[int, list[NDArray[np.uint8]]] = {}
"""What is registered, by number of an engine."""


class Described(msgspec.Struct, frozen=True):
    number: int
    sizes: tuple[int, ...]
    staging: StagingPlace | None


class ToyWire(Wire[Part]):
    """Copies all pieces of a part when it is asked whether it has ended, and its peer is not held."""

    def __init__(self, engine: Toy, peer: int) -> None:
        self._engine = engine
        self._peer = peer

    def open(self) -> None:
        if self._peer not in _memories:
            raise TransferError("gone")

    def begin(self, part: Part) -> Part:
        self.open()
        assert np.array_equal(part.source.nbytes, part.target.nbytes), "the sides are not cut alike"
        self._engine.begun.append(part)
        return part

    def ended(self, token: Part) -> bool:
        if self._peer in self._engine.held:
            return False
        self.open()
        there, here = _memories[self._peer], _memories[self._engine.number]
        for source, target in zip(_places(there, token.source), _places(here, token.target), strict=True):
            target[:] = source
        return True

    def close(self, under_way: Sequence[Part]) -> None:
        self._engine.dropped += under_way


class Toy(LinkedTransfer[Part, StagingOptions]):
    """Counts the parts that its library is told to read."""

    def __init__(self, options: StagingOptions, ctx: KVTransferContext) -> None:
        super().__init__(options, ctx, LIMITS, Staging.made(options, ctx, SECONDS))
        self.number = next(_numbers)
        self.begun: list[Part] = []
        self.held: set[int] = set()
        """Numbers of engines that are not read from now: what is under way stays so."""
        self.dropped: list[Part] = []
        regions = (*ctx.regions, *([] if self.staging is None else [self.staging.region]))
        _memories[self.number] = [np.frombuffer(one.buffer, np.uint8) for one in regions if one.buffer is not None]

    def describe(self) -> bytes:
        staging = None if self.staging is None else self.staging.place()
        return pack(KIND, Described(self.number, tuple(self.sizes.tolist()), staging))

    def reach(self, host: str, description: bytes) -> Reach[Part]:
        peer = unpack(KIND, description, Described)
        return Reach(ToyWire(self, peer.number), np.array(peer.sizes, np.int64), peer.staging)

    def shut(self) -> None:
        _memories.pop(self.number, None)


def _places(memory: Sequence[NDArray[np.uint8]], some: Ranges) -> Iterable[NDArray[np.uint8]]:
    for region, offset, nbytes in zip(some.region.tolist(), some.offset.tolist(), some.nbytes.tolist(), strict=True):
        assert offset + nbytes <= len(memory[region]), "beyond what is registered"
        yield memory[region][offset : offset + nbytes]


def slots(seed: int, count: int = SIZE // SLOT // 2) -> Ranges:
    """Return so many slots of a region, in any order."""
    found = np.random.default_rng(seed).permutation(SIZE // SLOT)[:count].astype(np.int64)
    return Ranges(np.zeros(count, np.int32), found * SLOT, np.full(count, SLOT, np.int64))


@dataclass
class Clock:
    """Real time, and what a test adds to it."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class Server:
    """An engine, a region of random bytes, and a clock of its own."""

    options: StagingOptions = field(default_factory=lambda: StagingOptions(staging=4 * 2**14))
    seed: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.memory = np.random.default_rng(self.seed).integers(0, 256, SIZE, np.uint8)
        region = Region(self.memory.ctypes.data, SIZE, SLOT, heads=1, buffer=self.memory.data)
        self.engine = Toy(self.options, KVTransferContext((region,), self.clock))
        self.engine.allow(LEASE)
        self.ended: dict[int, TransferNews] = {}

    def connect(self, other: Server, name: str = "peer") -> None:
        self.engine.connect(name, "127.0.0.1", other.engine.describe())

    def read(self, source: Ranges, target: Ranges, peer: str = "peer", lease: int = LEASE) -> int:
        return self.engine.read(peer, lease, source, target)

    def poll(self) -> None:
        self.ended |= {news.handle: news for news in self.engine.poll()}

    def wait(self, handle: int) -> TransferNews:
        """Wait for the end of a read."""
        self.until(lambda: handle in self.ended, "a read does not end")
        return self.ended[handle]

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, what
            self.poll()
            time.sleep(0.001)

    def holds(self, target: Ranges, source: Server, wanted: Ranges) -> bool:
        """Return whether the bytes of `target` are those that `wanted` has at the source."""
        here, there = (list(_places([one.memory], some)) for one, some in ((self, target), (source, wanted)))
        return bool(np.array_equal(np.concatenate(here), np.concatenate(there)))

    @property
    def taken(self) -> int:
        """Blocks that are taken."""
        return int(self.engine.stats()["staging_blocks_taken"])
