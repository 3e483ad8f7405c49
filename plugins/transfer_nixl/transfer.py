"""NixlTransfer: reads through NIXL."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.linked_transfer import LinkedTransfer, Reach
from pegboard.plugins.kv_handoff.api.links import Limits, Part, Wire
from pegboard.plugins.kv_handoff.api.staging import Staging
from pegboard.plugins.kv_handoff.api.staging_reader import StagingPlace
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, Ranges, TransferError
from pegboard.plugins.transfer_nixl.agent import Agent, Transfer, memory_of
from pegboard.plugins.transfer_nixl.options import NixlOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.transfer import Region

KIND = b"pegboard nixl 2\n"
PART_BYTES = 4 * 2**20
PART_PIECES = 4096
"""Of one transfer. On one machine UCX copies within the call, so this is what an abandoned read may still take."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A region: where it is, as NIXL's descriptors say it."""

    address: int
    nbytes: int
    device: int


class Description(msgspec.Struct, frozen=True):
    """What a peer needs: NIXL's own metadata, the regions, and the staging behind them."""

    agent: str
    metadata: bytes
    memory: str
    regions: tuple[Place, ...]
    staging: StagingPlace | None


class Places:
    """Regions as tables, from which descriptors are made."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.sizes: NDArray[np.int64] = np.array([one.nbytes for one in places], np.int64)
        self._table = np.array([(one.address, one.device) for one in places], np.uint64).reshape(-1, 2)

    def descriptors(self, ranges: Ranges) -> NDArray[np.uint64]:
        """Return uint64 [n, 3]: address, bytes, device."""
        found = np.empty((len(ranges), 3), np.uint64)
        found[:, 0] = self._table[ranges.region, 0] + ranges.offset.astype(np.uint64)
        found[:, 1] = ranges.nbytes
        found[:, 2] = self._table[ranges.region, 1]
        return found


class NixlWire(Wire[Transfer]):
    """A peer, known to the agent from the first opening on."""

    def __init__(self, agent: Agent, own: Places, peer: Description, places: Places) -> None:
        self._agent = agent
        self._own = own
        self._peer = peer
        self._places = places
        self._known = False

    def open(self) -> None:
        if self._known:
            self._agent.leave(self._peer.agent)
            self._known = False
        self._agent.know(self._peer.agent, self._peer.metadata)
        self._known = True

    def begin(self, part: Part) -> Transfer:
        here, there = self._own.descriptors(part.target), self._places.descriptors(part.source)
        return self._agent.begin(self._peer.agent, here, there, self._peer.memory)

    def ended(self, token: Transfer) -> bool:
        return self._agent.ended(token)

    def close(self, under_way: Sequence[Transfer]) -> None:
        self._agent.drop(under_way)
        if self._known and not under_way:
            self._agent.leave(self._peer.agent)


class NixlTransfer(LinkedTransfer[Transfer, NixlOptions]):
    """Registers the regions with an agent of NIXL, of which peers read: without this server's part in it, or with that
    of a thread of UCX's where the network cannot do better.
    """

    def __init__(self, options: NixlOptions, ctx: KVTransferContext) -> None:
        staging = Staging.made(options, ctx, options.timeout)
        super().__init__(options, ctx, Limits(PART_BYTES, PART_PIECES, options.parts, options.timeout), staging)
        regions = (*ctx.regions, *([] if staging is None else [staging.region]))
        self._own = Places([_place(region) for region in regions])
        self._agent = Agent(regions, options)

    @classmethod
    def supports(cls, options: NixlOptions, ctx: KVTransferContext) -> str | None:
        try:
            importlib.import_module("nixl._api")
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            return f"NIXL cannot be loaded ({error}); install it: pip install --no-deps nixl nixl-cu12"
        try:
            kinds = {memory_of(region.device)[0] for region in ctx.regions}
        except ValueError as error:
            return str(error)
        return "its regions must all be on the host, or all on CUDA devices" if len(kinds) > 1 else None

    def describe(self) -> bytes:
        places, agent = tuple(_place(region) for region in self.ctx.regions), self._agent
        staging = None if self.staging is None else self.staging.place()
        return pack(KIND, Description(agent.name, agent.metadata, agent.memory, places, staging))

    def reach(self, host: str, description: bytes) -> Reach[Transfer]:
        peer = unpack(KIND, description, Description)
        staging = [] if peer.staging is None else [Place(peer.staging.address, peer.staging.nbytes, 0)]
        try:
            places = Places([*peer.regions, *staging])
        except OverflowError as error:
            raise TransferError(f"a region of the peer is nowhere: {error}") from error
        wire = NixlWire(self._agent, self._own, peer, places)
        return Reach(wire, places.sizes[: len(peer.regions)], peer.staging)

    def shut(self) -> None:
        self._agent.close()


def _place(region: Region) -> Place:
    return Place(region.address, region.nbytes, memory_of(region.device)[1])
