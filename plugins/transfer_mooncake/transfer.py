"""MooncakeTransfer: reads through Mooncake's transfer engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.linked_transfer import LinkedTransfer, Reach
from pegboard.plugins.kv_handoff.api.links import Limits
from pegboard.plugins.kv_handoff.api.staging import Staging
from pegboard.plugins.kv_handoff.api.staging_reader import StagingPlace
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, TransferError
from pegboard.plugins.transfer_mooncake.engine import TOKEN, Engine, MooncakeWire, Pieces, library
from pegboard.plugins.transfer_mooncake.options import MooncakeTransferOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KIND = b"pegboard moon 2\n"
PART_BYTES = 2**20
PART_PIECES = 128
PARTS = 6
"""768 pieces under way at most: over TCP Mooncake takes 1,024 for each peer, and refuses some time after that."""


class Description(msgspec.Struct, frozen=True):
    """What a peer needs: the port of handshakes, the run's token and where it is, address and length of each region,
    and the staging behind them.
    """

    port: int
    token: bytes
    token_address: int
    regions: tuple[tuple[int, int], ...]
    staging: StagingPlace | None


class MooncakeTransfer(LinkedTransfer[Pieces, MooncakeTransferOptions]):
    """Registers the regions with an engine of Mooncake's, of which peers read. Where it is TCP, a thread of the library
    serves them.
    """

    def __init__(self, options: MooncakeTransferOptions, ctx: KVTransferContext) -> None:
        staging = Staging.made(options, ctx, options.timeout)
        super().__init__(options, ctx, Limits(PART_BYTES, PART_PIECES, PARTS, options.timeout), staging)
        regions = (*ctx.regions, *([] if staging is None else [staging.region]))
        self._engine = Engine(regions, options)
        self._bases, _ = _tables([(region.address, region.nbytes) for region in regions])

    @classmethod
    def supports(cls, options: MooncakeTransferOptions, ctx: KVTransferContext) -> str | None:
        try:
            library()
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            needs = "`apt-get install libibverbs1 librdmacm1 libnuma1`"
            return f"Mooncake's library cannot be loaded ({error}); it needs the system's libraries for RDMA: {needs}"
        if any(region.buffer is None for region in ctx.regions):
            return "it reads and writes the host's memory, and this KV is on another device"
        return None

    def describe(self) -> bytes:
        token, port = self._engine.token, self._engine.port
        places = tuple((region.address, region.nbytes) for region in self.ctx.regions)
        staging = None if self.staging is None else self.staging.place()
        return pack(KIND, Description(port, token.tobytes(), token.ctypes.data, places, staging))

    def reach(self, host: str, description: bytes) -> Reach[Pieces]:
        peer = unpack(KIND, description, Description)
        if len(peer.token) != TOKEN or not 0 <= peer.token_address <= 2**64 - TOKEN or not 0 < peer.port < 2**16:
            raise TransferError("a description has a token or a port that cannot be one")
        staging = [] if peer.staging is None else [(peer.staging.address, peer.staging.nbytes)]
        try:
            bases, sizes = _tables([*peer.regions, *staging])
        except OverflowError as error:
            raise TransferError(f"a region of the peer is nowhere: {error}") from error
        address = f"[{host}]:{peer.port}" if ":" in host else f"{host}:{peer.port}"
        token = peer.token_address, peer.token
        wire = MooncakeWire(self._engine, address, token, (self._bases, bases), self.options.timeout)
        return Reach(wire, sizes[: len(peer.regions)], peer.staging)

    def shut(self) -> None:
        self._engine.close()


def _tables(places: Sequence[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return addresses and sizes [regions]."""
    return np.array([at for at, _ in places], np.uint64), np.array([nbytes for _, nbytes in places], np.int64)
