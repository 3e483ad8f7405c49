"""Staging: memory by way of which libraries read many small pieces as few large ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from pegboard.core.interfaces.options import Options
from pegboard.plugins.kv_handoff.api.blocks import Blocks
from pegboard.plugins.kv_handoff.api.leases import Counts, Leases
from pegboard.plugins.kv_handoff.api.listening import Listener
from pegboard.plugins.kv_handoff.api.pieces import Memory
from pegboard.plugins.kv_handoff.api.protocol import MAGIC
from pegboard.plugins.kv_handoff.api.staging_reader import Landing, Orders, StagedWire, StagingPlace
from pegboard.plugins.kv_handoff.api.staging_source import Collector
from pegboard.plugins.kv_handoff.api.transfer import Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.links import TokenT, Wire
    from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext

logger = logging.getLogger(__name__)

BLOCK = 4 * 2**20
HELLO = 5.0
"""Seconds that a peer may take to say who it is."""

_kept: list[NDArray[np.uint8]] = []
"""Memory that a library may still write to after its end: kept for good."""


class StagingOptions(Options):
    """Options of engines that read small pieces by way of staging."""

    staging: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Memory for collecting small pieces for peers, in bytes, in blocks of at most 4 MiB, and the same for pieces from
    peers. 0: read piece by piece, which is also done if a peer has 0, or if KV is on another device."""
    staging_below: Annotated[int, Field(ge=1)] = 16 * 2**10
    """Pieces are collected if a read's pieces have fewer bytes than this on average."""
    listen_host: str = "127.0.0.1"
    """Address at which peers ask this server to collect pieces, with a token that they get from it. Peers that cannot
    reach it read piece by piece."""
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that address; 0: a free port, which peers are told."""


class Staging:
    """The staging of an engine: a region of its own behind the context's, half of it for peers to read, half of it for
    what is read from them. The engine registers `region` with its library.
    """

    def __init__(self, options: StagingOptions, ctx: KVTransferContext, seconds: float) -> None:
        self._options = options
        self._clock = ctx.clock
        self._seconds = seconds
        size = min(BLOCK, options.staging)
        side = options.staging // size * size
        self._memory = np.empty(2 * side, np.uint8)
        self.region = Region(self._memory.ctypes.data, 2 * side, size, heads=1, buffer=self._memory.data)
        self.leases = Leases()
        regions, counts, number = Memory(ctx.regions), Counts(), len(ctx.regions)
        self._counts = counts
        blocks = Blocks(self._memory[side:], size, side)
        self.landing = Landing(blocks, number, regions, counts, options.staging_below, ctx.clock, seconds)
        self._lent = Blocks(self._memory[:side], size, 0)
        self._collector = Collector(regions, self._lent, self.leases, counts, ctx.clock, seconds)
        self._listener = Listener(MAGIC, self._collector.serve, counts, HELLO)

    @classmethod
    def made(cls, options: StagingOptions, ctx: KVTransferContext, seconds: float) -> Staging | None:
        """Return the staging of an engine; None where it is off. Parts that take longer than `seconds` fail."""
        if not options.staging:
            return None
        if any(region.buffer is None for region in ctx.regions):
            logger.info("KV is on another device: small pieces are read one by one, and are not collected first")
            return None
        return cls(options, ctx, seconds)

    def place(self) -> StagingPlace:
        """Return what a peer needs, and take orders from the first call on. Raises OSError, with what to do."""
        port = self._listener.listen(self._options.listen_host, self._options.listen_port)
        self._collector.start()
        return StagingPlace(port, self._listener.token, self.region.address, self._lent.count, self._lent.size)

    def wire(self, inner: Wire[TokenT], host: str, place: StagingPlace, regions: int) -> StagedWire[TokenT]:
        """Return a wire that reads by way of blocks. The peer's staging is behind its other `regions`."""
        orders = Orders(host, place, self._clock, self._seconds)
        return StagedWire(inner, self.landing, orders, place, regions)

    def stats(self) -> Mapping[str, float]:
        """Return bytes collected and read by way of blocks, blocks that are taken, and bytes of orders that wait."""
        taken = sum(one.count - one.free for one in (self._lent, self.landing.blocks))
        waiting = self._collector.waiting_bytes
        return {**self._counts.all(), "staging_blocks_taken": taken, "staging_waiting_bytes": waiting}

    def close(self) -> None:
        """End, after all links. When this returns nothing is read from the regions, or written."""
        self.landing.close()
        self._collector.close()
        self._listener.close()
        if self.landing.blocks.free < self.landing.blocks.count:
            _kept.append(self._memory)
