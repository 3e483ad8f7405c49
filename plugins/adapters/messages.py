"""What the halves of the stage tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "adapters"


@dataclass(frozen=True, slots=True)
class Load:
    """Work: begin to read an adapter, in a thread. `uid` is the number of the load. One that was read before has the
    `digest` of its files, which must be the same.
    """

    uid: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Poll:
    """Work: tell which loads have ended since (a list of Loaded)."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Work: forget adapters that no request will use again."""

    uids: tuple[int, ...]


Work = Load | Poll | Drop


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that has ended; with an `error` there is nothing of it."""

    uid: int
    error: str = ""
    digest: str = ""
    rank: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """What goes with a batch: int64 [requests] the `slots` and the numbers of new tokens (`lens`) of its requests, and
    by slot the adapter that must be in it.
    """

    slots: NDArray[np.int64]
    lens: NDArray[np.int64]
    uids: dict[int, int]
