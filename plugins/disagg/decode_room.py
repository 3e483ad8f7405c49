"""What the decode side keeps of a room: what prefill has announced, and how far it has been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.step import TokenValues
from pegboard.plugins.disagg.events import Address, RoomState
from pegboard.plugins.disagg.messages import Meta, Ready, RoomKey
from pegboard.plugins.kv_handoff.api import Arrived

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import Verdict
    from pegboard.plugins.kv_handoff.api import KVReservation

NO_EPOCH = -1


@dataclass(slots=True)
class Piece:
    """Tokens [start, stop), read by `handle` in this epoch; None once they are here."""

    start: int
    stop: int
    handle: int | None = None


@dataclass(slots=True)
class DecodeRoom:
    """One request here. Of its `length` tokens `source` has the slots on the other side, as far as they are announced
    in this `epoch`. The first `kept` are here for good; those up to `told` were said to be taken, and those up to
    `begun` are being read.
    """

    key: RoomKey
    rid: str
    address: Address
    length: int
    digest: bytes
    attempt: int
    instance: bytes = b""
    principal: str = ""
    link: int | None = None
    epoch: int = NO_EPOCH
    lease: int = 0
    source: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    void: bool = False
    """Whether this epoch has ended, so that nothing of it is to be read."""
    meta: Meta | None = None
    memory: KVReservation | None = None
    begun: int = 0
    pieces: list[Piece] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    """Reads of what does not count any more, which may still write to its memory."""
    kept: int = 0
    told: int = 0
    told_last: bool = False
    shown: int = -1
    """`kept` as the last verdict told it."""
    retries: int = 0
    failure: Verdict | None = None
    """Why it has failed: nothing more is begun."""
    verdict: Verdict | None = None
    """What is to be told next."""

    @property
    def state(self) -> RoomState:
        if self.failure is not None:
            return RoomState.FAILED
        if self.link is None and not self.instance:
            return RoomState.BOOTSTRAPPING
        return RoomState.WAITING if self.memory is None else RoomState.TRANSFERRING

    @property
    def handles(self) -> set[int]:
        """Reads that may still write to its memory."""
        return self.stale.union(piece.handle for piece in self.pieces if piece.handle is not None)

    @property
    def here(self) -> int:
        """How many tokens are here, confirmed or not."""
        for piece in self.pieces:
            if piece.handle is not None:
                return piece.start
        return self.begun

    @property
    def through(self) -> bool:
        """Whether everything is here and confirmed."""
        return self.meta is not None and self.kept == self.length and not self.stale

    def announced(self, ready: Ready, slots: NDArray[np.int32]) -> bool:
        """Take what is new in an announcement. False where something before it is missing."""
        if ready.epoch > self.epoch:
            self.new_epoch(ready.epoch, ready.lease)
        elif self.void:
            return True
        known = int(self.source.shape[0])
        if ready.start > known:
            return False
        if ready.upto > known:
            self.source = np.concatenate([self.source, slots[known - ready.start :]])
        if ready.meta is not None and ready.upto == self.length:
            self.meta = ready.meta
        return True

    def new_epoch(self, epoch: int, lease: int) -> None:
        """Forget what was announced; what was confirmed stays."""
        self.end_epoch()
        self.epoch, self.lease, self.void, self.meta = epoch, lease, False, None
        self.source = self.source[:0]
        self.retries, self.told_last = 0, False

    def end_epoch(self) -> None:
        """Forget what is being read or is not confirmed: it does not count."""
        self.void, self.told = True, self.kept
        self.set_back()

    def set_back(self) -> None:
        """Have read again what is being read, or was not taken yet. What was taken is not: a confirmation of this epoch
        is of one reading.
        """
        done = [piece for piece in self.pieces if piece.stop <= self.told]
        self.stale = self.handles
        self.pieces = done
        self.begun = self.told

    def reserved(self, memory: KVReservation) -> None:
        self.memory = memory
        self.kept = self.told = self.begun = min(memory.start, self.length)

    def confirmed(self, upto: int) -> None:
        """Note that what was taken up to here was valid throughout."""
        self.kept = max(self.kept, min(upto, self.told))
        self.pieces = [piece for piece in self.pieces if piece.stop > self.kept]

    def arrived(self, meta: Meta) -> Arrived:
        """Return what has come: the whole prompt, with its token."""
        values = TokenValues(meta.logprob, meta.tops, meta.chosen, meta.rows, meta.cached_tokens)
        return Arrived(self.length, meta.token, values)
