"""What the halves of the stage send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "windows"


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group of a batch: `out_cache_loc` int64 [tokens], and what of its row table has changed: `places` int64 [n]
    (row x width + position) and `slots` int32 [n].
    """

    out_cache_loc: NDArray[np.int64]
    places: NDArray[np.int64]
    slots: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WindowWork:
    """All groups of a batch but the first."""

    groups: tuple[GroupWork, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for the memory that there is."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The pages of each group, and the rows and positions of a row table."""

    pages: tuple[int, ...]
    rows: int
    width: int
