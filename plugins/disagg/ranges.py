"""Slots of tokens as runs, and runs as ranges of bytes in all regions of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.kv_handoff.api.transfer import Ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PAIR = np.dtype("<i4")
MAX_SLOT = 2**31 - 1


class NotRuns(Exception):
    """Bytes that are not runs of slots for so many tokens."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Slots of consecutive tokens, neighbours merged: `first` int64 [n] and `count` int64 [n]."""

    first: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.first.shape[0])

    @classmethod
    def of(cls, slots: NDArray[np.int32]) -> Runs:
        """Return the runs of slots int32 [tokens]."""
        wide = slots.astype(np.int64)
        if not wide.shape[0]:
            return cls(wide, wide.copy())
        starts = np.flatnonzero(np.diff(wide, prepend=wide[0] - 2) != 1)
        return cls(wide[starts], np.diff(starts, append=wide.shape[0]))

    def packed(self) -> bytes:
        """Return the runs as a message has them: pairs of little-endian int32."""
        return np.stack((self.first, self.count), axis=1).astype(_PAIR).tobytes()

    @classmethod
    def unpacked(cls, data: bytes, tokens: int) -> Runs:
        """Return what `packed` made. It came over the network: raises NotRuns where it is not `tokens` slots."""
        if len(data) % (2 * _PAIR.itemsize):
            raise NotRuns(f"{len(data)} bytes are not pairs of numbers")
        pairs = np.frombuffer(data, dtype=_PAIR).astype(np.int64).reshape(-1, 2)
        first, count = pairs[:, 0].copy(), pairs[:, 1].copy()
        if (first < 0).any() or (count < 1).any() or (first + count > MAX_SLOT).any():
            raise NotRuns("a run begins below 0, has no slots, or reaches beyond all of them")
        if int(count.sum()) != tokens:
            raise NotRuns(f"runs of {int(count.sum())} slots for {tokens} tokens")
        return cls(first, count)

    def slots(self) -> NDArray[np.int32]:
        """Return the slots int32 [tokens] again."""
        ends = np.cumsum(self.count)
        within = np.arange(int(ends[-1]) if len(self) else 0) - np.repeat(ends - self.count, self.count)
        return (np.repeat(self.first, self.count) + within).astype(np.int32)


def ranges_of(slots: NDArray[np.int32], slot_bytes: Sequence[int]) -> Ranges:
    """Return where KV of these tokens lies, region by region, each in the tokens' order: as few pieces as slots have
    runs. `slot_bytes` are those of a slot in each region.
    """
    runs, sizes = Runs.of(slots), np.asarray(slot_bytes, np.int64)[:, None]
    region = np.repeat(np.arange(len(sizes), dtype=np.int32), len(runs))
    return Ranges(region, (sizes * runs.first).ravel(), (sizes * runs.count).ravel())
