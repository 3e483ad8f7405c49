"""What the halves of the stage send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "recurrent_states"


@dataclass(frozen=True, slots=True)
class Round:
    """Arrays int64 [runs], and `fresh` bool [runs], as `StateRound` has them."""

    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    fresh: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StateWork:
    """The states of one batch."""

    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class HowMany:
    """Asks for the number of slots."""
