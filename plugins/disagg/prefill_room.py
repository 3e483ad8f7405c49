"""What the prefill side keeps of a room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.disagg.events import RoomState
from pegboard.plugins.disagg.messages import Meta, RoomKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

Claim = tuple[bytes, int]
"""A decode server and the number that it gave to its request."""


@dataclass(slots=True)
class Question:
    """A `want` that stands: who asks, over which connection, since when, and when that connection was lost."""

    instance: bytes
    attempt: int
    length: int
    link: int
    since: float
    lost: float | None = None

    @property
    def claim(self) -> Claim:
        return self.instance, self.attempt


@dataclass(slots=True)
class PrefillRoom:
    """One request here. `slots` are those of its announced tokens in this epoch; of them `sent` have been told."""

    key: RoomKey
    rid: str
    length: int
    lease: int
    principal: str = ""
    open: bool = False
    epoch: int = 0
    slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    sent: int = 0
    told_all: bool = False
    question: Question | None = None
    meta: Meta | None = None
    ended: float | None = None
    failed: bool = False
    unwanted: bool = False
    """Whether it was dropped while it was computed. Another request of the decode server may want it still."""

    @property
    def state(self) -> RoomState:
        if self.failed:
            return RoomState.FAILED
        if self.question is None:
            return RoomState.BOOTSTRAPPING
        return RoomState.TRANSFERRING if self.sent else RoomState.WAITING
