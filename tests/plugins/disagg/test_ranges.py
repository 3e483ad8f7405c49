"""Slots as runs and as ranges of bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.plugins.disagg.ranges import NotRuns, Runs, ranges_of

SLOTS = st.lists(st.integers(0, 40), unique=True, max_size=30)


@given(slots=SLOTS)
@properties()
def test_runs_are_the_slots(slots: list[int]) -> None:
    array = np.array(slots, np.int32)
    runs = Runs.of(array)
    again = Runs.unpacked(runs.packed(), len(slots))
    assert again.slots().tolist() == slots
    assert again.slots().dtype == np.int32
    breaks = sum(one + 1 != other for one, other in itertools.pairwise(slots))
    assert len(runs) == (breaks + 1 if slots else 0)


@given(slots=SLOTS, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@properties()
def test_ranges_are_every_byte_in_order(slots: list[int], sizes: list[int]) -> None:
    ranges = ranges_of(np.array(slots, np.int32), sizes)
    pieces = list(zip(ranges.region.tolist(), ranges.offset.tolist(), ranges.nbytes.tolist(), strict=True))
    found = [(region, at) for region, offset, nbytes in pieces for at in range(offset, offset + nbytes)]
    assert found == [
        (region, slot * size + at) for region, size in enumerate(sizes) for slot in slots for at in range(size)
    ]
    assert [str(one.dtype) for one in (ranges.region, ranges.offset, ranges.nbytes)] == ["int32", "int64", "int64"]
    assert len(pieces) == len(sizes) * len(Runs.of(np.array(slots, np.int32)))


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        (b"\0" * 7, 1),
        (b"", 1),
        (np.array([5, 3], "<i4").tobytes(), 2),
        (np.array([-1, 3], "<i4").tobytes(), 3),
        (np.array([1, 0], "<i4").tobytes(), 0),
        (np.array([1, -1, 1, 2], "<i4").tobytes(), 1),
        (np.array([2**31 - 1, 2], "<i4").tobytes(), 2),
        (np.array([0, 2**31 - 1] * 3, "<i4").tobytes(), 5),
    ],
)
def test_what_is_not_runs_is_refused(data: bytes, tokens: int) -> None:
    with pytest.raises(NotRuns):
        Runs.unpacked(data, tokens)
