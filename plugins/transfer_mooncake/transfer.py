"""MooncakeTransfer: reads through Mooncake's transfer engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.core.interfaces.kv_transfer import KVTransferContext, TransferError
from pegboard.core.toolkit.transfer.described import pack, unpack
from pegboard.core.toolkit.transfer.linked import LinkedTransfer
from pegboard.core.toolkit.transfer.links import Limits
from pegboard.plugins.transfer_mooncake.engine import Engine, MooncakeWire, Pieces, library
from pegboard.plugins.transfer_mooncake.options import MooncakeTransferOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIND = b"pegboard moon 1\n"
PART_BYTES = 2**20
PART_PIECES = 128
PARTS = 6
"""768 pieces under way at most: over TCP Mooncake takes 1,024 for each peer, and refuses some time after that."""


class Description(msgspec.Struct, frozen=True):
    """What a peer needs: the port of handshakes, the run's token and where it is, address and length of each region."""

    port: int
    token: bytes
    token_address: int
    regions: tuple[tuple[int, int], ...]


class MooncakeTransfer(LinkedTransfer[Pieces, MooncakeTransferOptions]):
    """Registers the regions with an engine of Mooncake's, of which peers read. Where it is TCP, a thread of the library
    serves them.
    """

    def __init__(self, options: MooncakeTransferOptions, ctx: KVTransferContext) -> None:
        super().__init__(options, ctx, Limits(PART_BYTES, PART_PIECES, PARTS, options.timeout))
        self._engine = Engine(ctx.regions, options)
        places = tuple((region.address, region.nbytes) for region in ctx.regions)
        self._bases, _ = _tables(places)
        token = self._engine.token
        self._description = pack(KIND, Description(self._engine.port, token.tobytes(), token.ctypes.data, places))

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
        return self._description

    def wire(self, host: str, description: bytes) -> tuple[MooncakeWire, NDArray[np.int64]]:
        peer = unpack(KIND, description, Description)
        try:
            bases, sizes = _tables(peer.regions)
        except OverflowError as error:
            raise TransferError(f"a region of the peer is nowhere: {error}") from error
        address = f"[{host}]:{peer.port}" if ":" in host else f"{host}:{peer.port}"
        token = peer.token_address, peer.token
        return MooncakeWire(self._engine, address, token, (self._bases, bases), self.options.timeout), sizes

    def shut(self) -> None:
        self._engine.close()


def _tables(places: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return addresses and sizes [regions]."""
    return np.array([at for at, _ in places], np.uint64), np.array([nbytes for _, nbytes in places], np.int64)
