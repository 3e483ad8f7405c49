"""Engine: Mooncake's transfer engine, and the peers as it reads from them."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pegboard.plugins.kv_handoff.api.links import Wire
from pegboard.plugins.kv_handoff.api.transfer import TransferError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.links import Part
    from pegboard.plugins.kv_handoff.api.transfer import Region
    from pegboard.plugins.transfer_mooncake.options import MooncakeTransferOptions

logger = logging.getLogger(__name__)

TOKEN = 16
"""Bytes of the token of a run."""
LOOK = 0.0005
DONE, FAILED = 1, -1
"""What `transfer_check_status` says at the end; 0: it goes on; -2: it has timed out, and may still be written to."""

_written: list[NDArray[np.uint8]] = []
"""Memory that reads which have not ended may still write to: kept for good."""


class Library(Protocol):
    """What is used of `TransferEngine`."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int: ...

    def get_rpc_port(self) -> int: ...

    def batch_register_memory(self, buffer_addresses: list[int], capacities: list[int]) -> int: ...

    def batch_unregister_memory(self, buffer_addresses: list[int]) -> int: ...

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...

    def transfer_check_status(self, batch_id: int) -> int: ...


def library() -> type[Library]:
    """Return the class of engines. Raises ImportError."""
    from mooncake.engine import TransferEngine

    found: type[Library] = TransferEngine
    return found


class Engine:
    """Registers the regions, and beside them a token that no other run has: by that, readers know that they are where
    the description has sent them. Ports and addresses may be another run's by then.
    """

    def __init__(self, regions: Sequence[Region], options: MooncakeTransferOptions) -> None:
        # Without it the library makes a connection for each piece, in the thread that asks for it.
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        self.token: NDArray[np.uint8] = np.frombuffer(os.urandom(TOKEN), np.uint8).copy()
        made = library()()
        if made.initialize(options.hostname, "P2PHANDSHAKE", options.protocol, options.devices):
            raise OSError(f"Mooncake cannot listen at {options.hostname}; see what it has written to stderr")
        self.port = made.get_rpc_port()
        memory = {one.address: one.nbytes for one in regions if one.nbytes} | {self.token.ctypes.data: TOKEN}
        self._registered = list(memory)
        if code := made.batch_register_memory(self._registered, list(memory.values())):
            raise OSError(f"Mooncake cannot register the KV's memory: {code}")
        self.library: Library | None = made

    def close(self) -> None:
        """End the engine, its connections and its threads; where one of ours is still waiting in it, as soon as it is
        back, and until then peers are refused.
        """
        if self.library is not None:
            self.library.batch_unregister_memory(self._registered)
            self.library = None


class Pieces:
    """Pieces that are under way, in the order in which they began, and why there are no more."""

    def __init__(self) -> None:
        self.batches: deque[int] = deque()
        self.reason = ""


class MooncakeWire(Wire[Pieces]):
    """A peer, under the address of its handshakes.

    Each piece is a batch of its own: only of such a one does the library say when it has ended. Of a larger batch it
    says that it has failed while other pieces of it are still written, and so does the call that waits.
    """

    def __init__(
        self,
        engine: Engine,
        address: str,
        token: tuple[int, bytes],
        bases: tuple[NDArray[np.uint64], NDArray[np.uint64]],
        seconds: float,
    ) -> None:
        self._library = engine.library
        self._address = address
        self._token = token
        self._own, self._theirs = bases
        self._seconds = seconds

    def open(self) -> None:
        place, token = self._token
        found, asked = np.zeros(TOKEN, np.uint8), Pieces()
        self._begin_piece(asked, found.ctypes.data, place, TOKEN)
        until = time.monotonic() + self._seconds
        while not self.ended(asked):
            if time.monotonic() >= until:
                _written.append(found)
                raise TransferError(f"{self._address} has not answered for {self._seconds:g} s")
            time.sleep(LOOK)
        if found.tobytes() != token:
            raise TransferError(f"at {self._address} there is another server by now")

    def begin(self, part: Part) -> Pieces:
        source, target = part.source, part.target
        here = (self._own[target.region] + target.offset.astype(np.uint64)).tolist()
        there = (self._theirs[source.region] + source.offset.astype(np.uint64)).tolist()
        begun = Pieces()
        for own, their, nbytes in zip(here, there, source.nbytes.tolist(), strict=True):
            self._begin_piece(begun, own, their, nbytes)
            if begun.reason:
                break
        return begun

    def ended(self, token: Pieces) -> bool:
        assert self._library is not None
        while token.batches:
            try:
                state = self._library.transfer_check_status(token.batches[0])
            except Exception:
                # It may still be written, so it counts as under way: the peer is stuck if that lasts.
                logger.warning("Mooncake cannot say whether a read has ended", exc_info=True)
                return False
            if state not in (DONE, FAILED):
                return False
            token.batches.popleft()
            if state == FAILED:
                token.reason = token.reason or f"{self._address} does not give it, or has gone"
        if token.reason:
            raise TransferError(token.reason)
        return True

    def close(self, under_way: Sequence[Pieces]) -> None:
        self._library = None

    def _begin_piece(self, pieces: Pieces, here: int, there: int, nbytes: int) -> None:
        assert self._library is not None
        try:
            batch = self._library.batch_transfer_async_read(self._address, [here], [there], [nbytes])
        except Exception as error:
            pieces.reason = f"Mooncake does not read from {self._address}: {error}"
            return
        if batch:
            pieces.batches.append(batch)
        else:
            pieces.reason = f"{self._address} cannot be reached"
