"""Both sides of a read in the same pieces, for libraries that read piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.kv_transfer import Ranges
from pegboard.toolkit.transfer.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def alike(source: Ranges, target: Ranges) -> tuple[Ranges, Ranges]:
    """Return the same bytes in the same order, cut in the same places on both sides: in as few pieces as possible.

    Both have as many bytes. Neighbours that touch on both sides become one piece.
    """
    if not len(source):
        return source, target
    there, here = source, target
    if not np.array_equal(source.nbytes, target.nbytes):
        ends = np.union1d(np.cumsum(source.nbytes, dtype=np.int64), np.cumsum(target.nbytes, dtype=np.int64))
        starts = np.concatenate(([0], ends[:-1]))
        there, here = _cut(source, starts, ends), _cut(target, starts, ends)
    first = np.flatnonzero(np.concatenate(([True], ~(_goes_on(there) & _goes_on(here)))))
    nbytes = np.add.reduceat(there.nbytes, first)
    return Ranges(there.region[first], there.offset[first], nbytes), Ranges(
        here.region[first], here.offset[first], nbytes
    )


def parts(source: Ranges, target: Ranges, most_bytes: int, most_pieces: int) -> Iterator[tuple[Ranges, Ranges]]:
    """Yield both sides of a read part by part, each with at most so many bytes and pieces, and cut alike."""
    source, target = alike(source, target)
    there, here = Pieces(source), Pieces(target)
    for begin, end in there.cuts(most_bytes, most_pieces):
        yield there.part(begin, end), here.part(begin, end)


def _cut(ranges: Ranges, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
    """Return the pieces from `starts` to `ends` of the stream, none of which reaches over a piece of `ranges`."""
    own = np.cumsum(ranges.nbytes, dtype=np.int64)
    at = np.searchsorted(own, starts, side="right")
    offset = ranges.offset[at] + starts - (own[at] - ranges.nbytes[at])
    return Ranges(ranges.region[at], offset, ends - starts)


def _goes_on(ranges: Ranges) -> NDArray[np.bool_]:
    """Return for each piece but the first whether it begins where the one before it ends."""
    ends = ranges.offset[:-1] + ranges.nbytes[:-1]
    goes_on: NDArray[np.bool_] = (ranges.region[1:] == ranges.region[:-1]) & (ranges.offset[1:] == ends)
    return goes_on
