"""For logits processors: distinct places (row, token) in a batch's logits, gathered row by row on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.logits_processor import LogitsProcessorContext

LAST_RESORT = float(np.finfo(np.float32).min)
"""The logit of a token that may be taken only where nothing else is left. What a request must not get has minus
infinity, but a grammar may allow nothing but just that, and a row without any finite logit fails."""


@dataclass(slots=True)
class Pairs:
    """Distinct places in the logits: `rows` and `ids` int64 [pairs], and a number float32 [pairs] for each."""

    rows: torch.Tensor
    ids: torch.Tensor
    numbers: torch.Tensor


class PairsBuilder:
    """Collects the pairs of a batch, row by row. The ids of a row must be distinct."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: NDArray[np.int64], numbers: NDArray[np.floating[Any]] | float) -> None:
        """Add the same number to all ids of a row, or one to each."""
        self._rows.append(row)
        self._ids.append(ids)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, dtype=np.float32), ids.shape))

    def finish(self, ctx: LogitsProcessorContext) -> Pairs | None:
        """Return all pairs where the logits are; None where there are none."""
        if not any(map(len, self._ids)):
            return None
        rows = np.repeat(np.array(self._rows, dtype=np.int64), [len(ids) for ids in self._ids])
        ids, numbers = np.concatenate(self._ids), np.concatenate(self._numbers)
        return Pairs(*ctx.on_device(rows, ids, numbers))
