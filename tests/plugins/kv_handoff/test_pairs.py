"""Both sides of a read, cut alike: against bytes one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.plugins.kv_handoff.api.pieces import pair, parts
from pegboard.plugins.kv_handoff.api.transfer import Ranges
from pegboard.plugins.kv_handoff.suite.rig import Piece, pages, ranges, recut


def places(some: Ranges) -> list[tuple[int, int]]:
    """Region and offset of each byte."""
    pieces = zip(some.region.tolist(), some.offset.tolist(), some.nbytes.tolist(), strict=True)
    return [(region, at) for region, offset, nbytes in pieces for at in range(offset, offset + nbytes)]


def listed(some: Ranges) -> list[Piece]:
    return list(zip(some.region.tolist(), some.offset.tolist(), some.nbytes.tolist(), strict=True))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Ranges, Ranges]:
    lengths = draw(st.lists(st.integers(1, 40), max_size=12))
    made = []
    for _ in range(2):
        pieces = [(draw(st.integers(0, 2)), draw(st.integers(0, 50)), nbytes) for nbytes in lengths]
        made.append(ranges(recut(pieces, draw(st.lists(st.integers(1, 9), max_size=12)))))
    return made[0], made[1]


@properties(max_examples=150)
@given(both=sides())
def test_the_same_bytes_in_the_same_order(both: tuple[Ranges, Ranges]) -> None:
    source, target = pair(*both)
    assert source.nbytes.tolist() == target.nbytes.tolist()
    assert (places(source), places(target)) == (places(both[0]), places(both[1]))
    for (there, here), (next_there, next_here) in itertools.pairwise(zip(listed(source), listed(target), strict=True)):
        goes_on = [(one[0], one[1] + one[2]) == after[:2] for one, after in ((there, next_there), (here, next_here))]
        assert not all(goes_on), "two pieces could be one"


@properties(max_examples=100)
@given(both=sides(), most_bytes=st.integers(1, 60), most_pieces=st.integers(1, 5))
def test_parts_keep_to_their_limits(both: tuple[Ranges, Ranges], most_bytes: int, most_pieces: int) -> None:
    found = list(parts(*both, most_bytes, most_pieces))
    assert all(len(source) == len(target) <= most_pieces for source, target in found)
    assert all((source.nbytes == target.nbytes).all() and source.total <= most_bytes for source, target in found)
    for number, whole in enumerate(both):
        assert [one for part in found for one in places(part[number])] == places(whole)


def test_neighbours_become_one_piece() -> None:
    source, target = pair(pages(2, [4, 5, 6, 1], 10), pages(2, [7, 8, 9, 0], 10))
    assert listed(source) == [(0, 40, 30), (0, 10, 10), (1, 40, 30), (1, 10, 10)]
    assert listed(target) == [(0, 70, 30), (0, 0, 10), (1, 70, 30), (1, 0, 10)]


def test_large_offsets() -> None:
    far = 2**62
    source, target = pair(ranges([(0, far, 10)]), ranges([(1, 5, 4), (1, far, 6)]))
    assert listed(source) == [(0, far, 4), (0, far + 4, 6)]
    assert listed(target) == [(1, 5, 4), (1, far, 6)]
    assert source.offset.dtype == np.int64
