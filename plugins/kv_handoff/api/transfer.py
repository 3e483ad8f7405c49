"""Contract: reading KV out of another server's memory.

One server lets others read the buffers of its KV pool, another one reads into its own. Nothing is ever written into
another server's memory, so what comes late can be ignored. Engines know bytes: regions, ranges, reads. Tokens, pages
and requests are their callers'.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock

MAX_DESCRIPTION = 256 * 2**10
"""Bytes of a description at most."""


class TransferError(Exception):
    """A transfer cannot be begun: the peer is unknown, or its description is not one. The message is for the log."""


@dataclass(frozen=True, slots=True)
class Region:
    """A buffer of a KV pool, K or V of a layer: `nbytes` bytes from `address` on, on `device` as torch spells it.

    Each slot has `slot_bytes`, in which `heads` heads follow each other. `buffer` is the same memory, to be read and
    written, where the process may touch it itself, and None on a device of its own.
    """

    address: int
    nbytes: int
    slot_bytes: int
    heads: int
    device: str = "cpu"
    buffer: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Pieces of regions, one after the other: `region` int32 [n] is an index into the context's regions, `offset` int64
    [n] in bytes from its beginning, `nbytes` int64 [n] the piece's length, at least 1.
    """

    region: NDArray[np.int32]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.region.shape[0])

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class KVTransferContext:
    """The buffers that others may read, and that reads go to; and the clock that deadlines are of."""

    regions: tuple[Region, ...]
    clock: Clock = time.monotonic


class TransferState(enum.Enum):
    """How a read ended. In each of these states nothing more is written to its target."""

    DONE = "done"
    """All bytes are there."""
    FAILED = "failed"
    """They are not, or not all of them."""
    GONE = "gone"
    """It was abandoned."""


class TransferNews(NamedTuple):
    """The end of a read; `reason` says for people why it failed."""

    handle: int
    state: TransferState
    reason: str = ""


class KVTransfer(abc.ABC, Generic[OptionsT]):
    """Reads ranges of bytes from peers into this server's regions. All calls come from one thread, and none of them
    blocks: what takes time goes on elsewhere, and `poll` tells its end.

    A *peer* is a name that the caller gives to one run of another server. A *lease* is a number from 0 to 2**64 - 1
    that the source gives to what it lets others read, and later to nothing else; the reader names it with each read.
    """

    def __init__(self, options: OptionsT, ctx: KVTransferContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: KVTransferContext) -> str | None:
        """Return None, or the reason why it cannot work here, with what to do."""
        return None

    # ---- the source -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def describe(self) -> bytes:
        """Return what a peer needs to read from here; at most MAX_DESCRIPTION bytes. It holds as long as this runs."""

    def allow(self, lease: int) -> None:
        """Let peers read under this lease from now on. Where it stands already nothing changes: reads under way go on,
        and one `revoke` ends it. An engine that is not `fenced` may let them read anyway.
        """

    def revoke(self, lease: int) -> None:
        """End a lease. With the capability `fenced` no read under it that has not ended by now ends as DONE, unless all
        its bytes had been read before. Of a lease that is not there it must not mind.
        """

    # ---- the reader -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def connect(self, peer: str, host: str, description: bytes) -> None:
        """Get to know a peer at this address, with what it has said of itself. Connecting may go on behind the call;
        where it comes to nothing, reads fail. Raises TransferError for a description that is not one (it came over the
        network, and may be anything), and where the system has no descriptor or thread left. A peer of this name is
        forgotten first, as by `disconnect`.
        """

    @abc.abstractmethod
    def read(self, peer: str, lease: int, source: Ranges, target: Ranges) -> int:
        """Begin to read `source`, of the peer's regions, into `target`, of these here; return a handle that no other
        read has had. Both have as many bytes; their pieces need not be cut in the same places.

        Raises TransferError for a peer that is not connected, and ValueError for a target beyond the regions, or with
        another number of bytes. Both may be empty. A source beyond the peer's regions makes the read fail.
        """

    @abc.abstractmethod
    def poll(self) -> Sequence[TransferNews]:
        """Return the reads that have ended since the last call, each once."""

    @abc.abstractmethod
    def abandon(self, handle: int) -> None:
        """Ask a read to end. `poll` tells of it as ever: GONE, or what it came to before that. Until then its target
        may still be written to, for ever if need be. Of a handle that has ended it must not mind.
        """

    @abc.abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer. Its reads end as if they had been abandoned. Of one that is not known it must not mind."""

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know (bytes read and served, reads that failed...), by name. The names of
        counts, which only grow, end in `_total`.
        """
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """End all reads, and serve none any more. When this returns nothing is written to the regions, and nothing
        is read from them.
        """
