"""Pieces of regions: checked, cut at any byte, paired, gathered into one buffer and dealt out of one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.kv_handoff.api.transfer import Ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.transfer import Region

LARGE_PIECE = 2048
"""Bytes from which a loop over pieces costs less than what is moved."""
_FEW = 16
_SMALL_UNIT = 16


def objection(ranges: Ranges, sizes: NDArray[np.int64]) -> str:
    """Return what is wrong with pieces of regions of these sizes in bytes, "" where nothing is."""
    region, offset, nbytes = ranges.region, ranges.offset, ranges.nbytes
    if not region.shape == offset.shape == nbytes.shape == (len(ranges),):
        return f"shapes differ: {region.shape}, {offset.shape}, {nbytes.shape}"
    if not len(ranges):
        return ""
    if region.min() < 0 or region.max() >= len(sizes):
        return f"there are {len(sizes)} regions, not {int(region.max()) + 1} or less than none"
    if nbytes.min() < 1:
        return f"a piece has {int(nbytes.min())} bytes"
    sizes_of = sizes[region]
    # Not offset + nbytes, which may overflow.
    bad = (offset < 0) | (nbytes > sizes_of) | (offset > sizes_of - nbytes)
    if bad.any():
        at = int(bad.argmax())
        return (
            f"{int(nbytes[at])} bytes from byte {int(offset[at])} on are beyond region {int(region[at])}, which has "
            f"{int(sizes_of[at])}"
        )
    return ""


def check_read(source: Ranges, target: Ranges, sizes: NDArray[np.int64]) -> None:
    """Raise ValueError for a target beyond regions of these sizes, a source with another number of bytes, and for
    pieces without bytes. Whether the source is within the peer's regions is not known here.
    """
    if wrong := objection(target, sizes):
        raise ValueError(f"the target of a read: {wrong}")
    if not source.region.shape == source.offset.shape == source.nbytes.shape == (len(source),):
        raise ValueError("the source of a read: its arrays have other shapes")
    # Piece by piece as well, since a sum may overflow.
    if len(source) and not 1 <= int(source.nbytes.min()) <= int(source.nbytes.max()) <= target.total:
        raise ValueError(f"the source of a read: pieces have from 1 to {target.total} bytes here")
    if source.total != target.total:
        raise ValueError(f"{source.total} bytes cannot be read into {target.total}")


class Pieces:
    """Ranges as a stream of bytes, which can be cut anywhere."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.ends: NDArray[np.int64] = np.cumsum(ranges.nbytes, dtype=np.int64)
        self.total = int(self.ends[-1]) if len(ranges) else 0

    def cuts(self, most_bytes: int, most_pieces: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each part with at most so many bytes and pieces, between pieces where that is
        possible.
        """
        begin = 0
        while begin < self.total:
            first = int(np.searchsorted(self.ends, begin, side="right"))
            last = min(int(np.searchsorted(self.ends, begin + most_bytes, side="right")), first + most_pieces)
            end = int(self.ends[last - 1]) if last > first else begin + most_bytes
            yield begin, end
            begin = end

    def part(self, begin: int, end: int) -> Ranges:
        """Return the pieces of the bytes from `begin` to `end`, at least one."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        some = slice(first, last + 1)
        region, offset, nbytes = self.ranges.region[some], self.ranges.offset[some], self.ranges.nbytes[some]
        before = begin - int(self.ends[first] - nbytes[0])
        after = int(self.ends[last]) - end
        if before or after:
            offset, nbytes = offset.copy(), nbytes.copy()
            offset[0] += before
            nbytes[0] -= before
            nbytes[-1] -= after
        return Ranges(region, offset, nbytes)


class Memory:
    """Regions that this process may read and write itself."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.views = [region.buffer.cast("B") for region in regions if region.buffer is not None]
        if len(self.views) != len(regions):
            raise ValueError("a region is not in the host's memory")
        self.arrays = [np.frombuffer(view, np.uint8) for view in self.views]
        self.sizes: NDArray[np.int64] = np.array([region.nbytes for region in regions], np.int64)

    def pieces(self, ranges: Ranges) -> list[memoryview]:
        """Return the memory of each piece."""
        views = self.views
        places = zip(ranges.region.tolist(), ranges.offset.tolist(), ranges.nbytes.tolist(), strict=True)
        return [views[region][offset : offset + nbytes] for region, offset, nbytes in places]

    def gather(self, ranges: Ranges, out: NDArray[np.uint8]) -> None:
        """Copy all pieces into `out` uint8 [total], one after the other."""
        unit = _unit(ranges)
        if not unit:
            begin, data = 0, out.data
            for piece in self.pieces(ranges):
                data[begin : begin + len(piece)] = piece
                begin += len(piece)
            return
        records = out.view(np.dtype((np.void, unit)))
        for number, index, where in _by_region(ranges, unit):
            source = self._records(number, unit)
            if isinstance(where, slice):
                # "clip" for its speed: pieces have been checked, and "raise" takes a copy.
                np.take(source, index, out=records[where], mode="clip")
            else:
                records[where] = source[index]

    def scatter(self, ranges: Ranges, data: NDArray[np.uint8]) -> None:
        """Fill all pieces from uint8 [total], one after the other."""
        unit = _unit(ranges)
        if not unit:
            begin, source = 0, data.data
            for piece in self.pieces(ranges):
                piece[:] = source[begin : begin + len(piece)]
                begin += len(piece)
            return
        records = data.view(np.dtype((np.void, unit)))
        for number, index, where in _by_region(ranges, unit):
            self._records(number, unit)[index] = records[where]

    def _records(self, number: int, unit: int) -> NDArray[np.void]:
        array = self.arrays[number]
        return array[: len(array) // unit * unit].view(np.dtype((np.void, unit)))


def _unit(ranges: Ranges) -> int:
    """Return a length that all pieces are made of, at multiples of it in their regions; 0 where they are better copied
    one by one.
    """
    offset, nbytes = ranges.offset, ranges.nbytes
    if len(ranges) < _FEW or ranges.total >= len(ranges) * LARGE_PIECE:
        return 0
    unit = int(nbytes.min())
    if (nbytes % unit).any() or (offset % unit).any():
        unit = int(np.gcd(np.gcd.reduce(nbytes), np.gcd.reduce(offset)))
    return unit if unit >= _SMALL_UNIT else 0


def _by_region(ranges: Ranges, unit: int) -> Iterator[tuple[int, NDArray[np.int64], slice | NDArray[np.int64]]]:
    """Yield region by region which of its records belong to the pieces, and where these stand in the stream, both in
    units.
    """
    region, index = ranges.region, ranges.offset // unit
    counts = ranges.nbytes // unit
    if counts.max() > 1:
        starts = np.cumsum(counts) - counts
        index = np.repeat(index - starts, counts) + np.arange(int(counts.sum()))
        region = np.repeat(region, counts)
    bounds = [0, *(np.flatnonzero(np.diff(region)) + 1).tolist(), len(region)]
    if len(bounds) * _FEW <= len(region) or len(bounds) == 2:
        for begin, end in itertools.pairwise(bounds):
            yield int(region[begin]), index[begin:end], slice(begin, end)
        return
    # Each region's pieces are many and short: collected, since a call costs as much as some ten of them.
    order = np.argsort(region, kind="stable")
    numbers, starts = np.unique(region[order], return_index=True)
    for number, where in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        yield number, index[where], where


def pair(source: Ranges, target: Ranges) -> tuple[Ranges, Ranges]:
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
    source, target = pair(source, target)
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
