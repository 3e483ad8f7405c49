"""Pieces of regions, against loops over bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pegboard.conformance.properties import properties
from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces, check_read, objection
from pegboard.plugins.kv_handoff.api.transfer import Ranges, Region
from pegboard.plugins.kv_handoff.suite.rig import Piece, ranges

SIZES = np.array([4096, 1000, 2400], np.int64)


def memory(seed: int = 0) -> tuple[Memory, list[NDArray[np.uint8]]]:
    draw = np.random.default_rng(seed)
    arrays = [draw.integers(0, 256, size, np.uint8) for size in SIZES.tolist()]
    return Memory([Region(0, one.nbytes, 1, 1, buffer=one.data) for one in arrays]), arrays


def bytes_of(some: Ranges, arrays: list[NDArray[np.uint8]]) -> list[int]:
    places = zip(some.region.tolist(), some.offset.tolist(), some.nbytes.tolist(), strict=True)
    return [int(arrays[region][at]) for region, offset, nbytes in places for at in range(offset, offset + nbytes)]


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Pieces of slots, of runs of slots, or of any bytes; region after region, or crosswise."""
    unit = draw(st.sampled_from([1, 3, 16, 24, 48]))
    most = draw(st.sampled_from([1, 1, 3, 200]))
    found = []
    for _ in range(draw(st.integers(0, 60))):
        region = draw(st.integers(0, len(SIZES) - 1))
        nbytes = unit * draw(st.integers(1, min(most, int(SIZES[region]) // unit)))
        found.append((region, unit * draw(st.integers(0, (int(SIZES[region]) - nbytes) // unit)), nbytes))
    return sorted(found) if draw(st.booleans()) else found


@properties(max_examples=60)
@given(some=pieces())
def test_gather(some: list[Piece]) -> None:
    source, arrays = memory()
    wanted = ranges(some)
    out = np.zeros(wanted.total, np.uint8)
    source.gather(wanted, out)
    assert out.tolist() == bytes_of(wanted, arrays)
    assert b"".join(source.pieces(wanted)) == out.tobytes()


@properties(max_examples=60)
@given(some=pieces())
def test_scatter(some: list[Piece]) -> None:
    """Where pieces overlap, the last one counts."""
    target, arrays = memory()
    wanted = ranges(some)
    data = np.random.default_rng(1).integers(0, 256, wanted.total, np.uint8)
    expected, begin = [one.copy() for one in arrays], 0
    for region, offset, nbytes in some:
        expected[region][offset : offset + nbytes] = data[begin : begin + nbytes]
        begin += nbytes
    target.scatter(wanted, data)
    assert [one.tobytes() for one in arrays] == [one.tobytes() for one in expected]


@properties(max_examples=60)
@given(some=pieces(), most=st.integers(1, 300), count=st.integers(1, 40))
def test_cuts(some: list[Piece], most: int, count: int) -> None:
    """They follow each other, are within bounds, and cut a piece only where one is larger than a part."""
    _, arrays = memory()
    whole = Pieces(ranges(some))
    found, ends = list(whole.cuts(most, count)), {0, *whole.ends.tolist()}
    assert [begin for begin, _ in found] + [whole.total] == [0] + [end for _, end in found]
    parts = [whole.part(begin, end) for begin, end in found]
    assert [part.total for part in parts] == [end - begin for begin, end in found]
    assert all(part.total <= most and len(part) <= count for part in parts)
    assert [byte for part in parts for byte in bytes_of(part, arrays)] == bytes_of(whole.ranges, arrays)
    longest = max((nbytes for _, _, nbytes in some), default=0)
    assert longest > most or all(end in ends for _, end in found)
    assert [one.tolist() for one in (whole.ranges.offset, whole.ranges.nbytes)] == [
        [offset for _, offset, _ in some],
        [nbytes for _, _, nbytes in some],
    ]


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        ((3, 0, 1), "there are 3 regions"),
        ((-1, 0, 1), "there are 3 regions"),
        ((1, 0, 1001), "1001 bytes from byte 0 on are beyond region 1, which has 1000"),
        ((1, 1000, 1), "beyond region 1"),
        ((1, -1, 1), "beyond region 1"),
        ((1, 2**63 - 1, 2), "beyond region 1"),
        ((1, 0, 0), "a piece has 0 bytes"),
        ((1, 5, -5), "a piece has -5 bytes"),
    ],
)
def test_objections(piece: Piece, says: str) -> None:
    fine = [(0, 0, 4096), (1, 999, 1), (2, 0, 1)]
    assert objection(ranges(fine), SIZES) == ""
    assert says in objection(ranges([*fine, piece]), SIZES)


def test_arrays_have_one_shape() -> None:
    some = ranges([(0, 0, 1), (0, 1, 1)])
    for wrong in (
        Ranges(some.region, some.offset, some.nbytes[:1]),
        Ranges(some.region[:1], some.offset, some.nbytes),
        Ranges(some.region, some.offset.reshape(2, 1), some.nbytes),
    ):
        assert "shapes differ" in objection(wrong, SIZES)
        with pytest.raises(ValueError):
            check_read(wrong, some, SIZES)


def test_sums_that_overflow_are_no_sums() -> None:
    """Two pieces of 2**63 bytes have 0 bytes together, in int64."""
    target = ranges([(0, 0, 8)])
    huge = ranges([(0, 0, 2**62)] * 4 + [(0, 0, 8)])
    assert huge.total == target.total
    with pytest.raises(ValueError, match="pieces have from 1 to 8 bytes"):
        check_read(huge, target, SIZES)


def test_memory_of_another_device() -> None:
    with pytest.raises(ValueError, match="not in the host's memory"):
        Memory([Region(0, 16, 1, 1, device="cuda")])
