"""What the halves tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.trees import TokenTrees

NAME = "speculation"
MAX_FAILURES = 10
"""What has failed this often in a row is not called any more."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a speculator is told of a batch, an entry per request where it says [batch]; see `Stands`.

    `rows`, `starts` and `counts` int64 [batch]: the row, and which positions are computed. `logits_indices` int64
    [sampled, or nodes] are the packed tokens that something is drawn at, None for all. `trees` are the drafts, if any.
    `fresh` bool [batch]: it has its row since this pass. `slots` int64 [batch]: for so many positions its row has some.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    logits_indices: NDArray[np.int64] | None
    trees: TokenTrees | None
    fresh: NDArray[np.bool_]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What drafting on the device needs, see `DraftBatch`."""

    rows: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    newest: NDArray[np.int64]
    most: NDArray[np.int64]


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What goes with an output: tokens that were drafted for its request and verified, and those of them accepted."""

    drafted: int
    accepted: int


def worth_telling(failures: int) -> bool:
    """Return whether the log should have this failure, of so many since the start: the 1st, 10th, 100th and so on. One
    that comes and goes would fill the log.
    """
    return str(failures).rstrip("0") == "1"
