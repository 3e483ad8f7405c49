"""What is planned on the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.properties import properties
from pegboard.plugins.attn_flashinfer.planning import (
    Kind,
    Lens,
    Use,
    choose,
    first_keys,
    list_pages,
    merge_fits,
    shared_pages,
    uses_tensor_cores,
)


def lens(*requests: tuple[int, int], tails: tuple[int, ...] = (), common: int = 0) -> Lens:
    """Return (keys, new tokens) of each request."""
    seq, new = np.array(requests, dtype=np.int64).T
    tail = np.array(tails or [0] * len(seq), dtype=np.int64)
    return Lens(seq, new, tail, bool(tail.any()), common)


@properties()
@given(
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 80),
    page_size=st.sampled_from((1, 3, 16, 64)),
)
def test_pages_hold_what_is_seen(requests: list[tuple[int, int]], window: int | None, page_size: int) -> None:
    """All of it and, but for the rest of the first page, nothing before; the last page ends with the last key."""
    some = lens(*((prefix + new, new) for prefix, new in requests))
    pages = list_pages(some.seq, first_keys(some, window), page_size)
    assert pages.kv_indptr.dtype == pages.last_page_len.dtype == pages.firsts.dtype == np.int32
    assert bool(((pages.last_page_len >= 1) & (pages.last_page_len <= page_size)).all())
    counts = np.diff(pages.kv_indptr)
    assert counts.max() == pages.longest
    for (prefix, new), first, count, last in zip(requests, pages.firsts, counts, pages.last_page_len, strict=True):
        needed = 0 if window is None else max(0, prefix - window + 1)
        assert first == needed // page_size
        assert (first + count - 1) * page_size + last == prefix + new


def test_windows_of_trees_begin_at_their_roots() -> None:
    """A node may stand many slots behind its place: the tail says where its root is, not the new tokens."""
    assert first_keys(lens((50, 1), (50, 1), tails=(9, 0)), 4).tolist() == [50 - 9 - 3, 50 - 1 - 3]


def test_shared_pages() -> None:
    pages = shared_pages(48, 16)
    assert (pages.kv_indptr.tolist(), pages.last_page_len.tolist(), pages.firsts.tolist()) == ([0, 3], [16], [0])


@pytest.mark.parametrize(
    ("some", "use"),
    [
        (lens((9, 1), (40, 1)), Use.DECODE),
        (lens((9, 1), (40, 2)), Use.PREFILL),
        (lens((9, 1), (40, 2), tails=(0, 3)), Use.MASKED),
        (lens((9, 1), (40, 1), tails=(0, 3), common=8), Use.MASKED),
        (lens((9, 1), (40, 1), common=8), Use.CASCADE),
        (lens((9, 1), (40, 30), common=8), Use.CASCADE),
        (lens((9, 2), (40, 1), common=8), Use.PREFILL),
        (lens((9, 1), common=8), Use.DECODE),
    ],
)
def test_which_wrapper(some: Lens, use: Use) -> None:
    kind = Kind.of(make_layer(8, 2, 128))
    assert choose(kind, some, cascade=True, itemsize=2) is use
    if use is Use.CASCADE:
        assert choose(kind, some, cascade=False, itemsize=2) is not use
        assert choose(Kind.of(make_layer(8, 2, 128, window=20)), some, cascade=True, itemsize=2) is not use
        assert choose(Kind.of(make_layer(128, 2, 128)), some, cascade=True, itemsize=2) is not use


def test_values_of_another_size_are_not_for_the_decode_wrapper() -> None:
    assert choose(Kind.of(make_layer(8, 2, 128, 64)), lens((9, 1)), cascade=False, itemsize=2) is Use.PREFILL


def test_how_many_heads_can_be_merged() -> None:
    assert merge_fits(Kind.of(make_layer(64, 8, 128)), 2)
    assert not merge_fits(Kind.of(make_layer(65, 5, 128)), 2)
    assert merge_fits(Kind.of(make_layer(128, 8, 64)), 2)


def test_tensor_cores() -> None:
    assert not uses_tensor_cores(Kind.of(make_layer(4, 2)), eight_bit=False)
    assert uses_tensor_cores(Kind.of(make_layer(4, 2)), eight_bit=True)
    assert uses_tensor_cores(Kind.of(make_layer(8, 2)), eight_bit=False)
