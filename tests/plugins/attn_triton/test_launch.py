"""Shapes of launches, which need no triton."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention_fakes import make_layer
from pegboard.conformance.properties import properties
from pegboard.plugins.attn_triton.launch import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    MIN_SPLIT,
    Kind,
    decode_blocks,
    extend_blocks,
    extend_tiles,
    power_of_two,
    split_decode,
)
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

OPTIONS = TritonAttentionOptions()


@properties()
@given(
    lens=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 200)), min_size=1, max_size=8),
    tokens=st.integers(1, 64),
    window=st.none() | st.integers(1, 50),
)
def test_tiles_cover_each_token_once(lens: list[tuple[int, int]], tokens: int, window: int | None) -> None:
    requests = np.arange(len(lens)) * 3 + 1
    prefix, new = np.array(lens, dtype=np.int64).T
    tiles = extend_tiles(requests, new, prefix, tokens, window)
    covered = [(request, token) for request, first in tiles.tolist() for token in range(first, first + tokens)]
    wanted = [(request, token) for request, count in zip(requests, new, strict=True) for token in range(count)]
    beyond = set(covered) - set(wanted)
    assert len(covered) == len(set(covered))
    assert set(wanted) <= set(covered)
    assert len(beyond) < tokens * len(lens)


def test_longest_tiles_run_first() -> None:
    tiles = extend_tiles(np.array([0, 1]), np.array([64, 32]), np.array([0, 500]), 32, None)
    assert tiles.tolist() == [[1, 0], [0, 32], [0, 0]]


@properties()
@given(
    seen=st.lists(st.integers(1, 100_000), min_size=1, max_size=64),
    programs=st.integers(1, 32),
    keys=st.sampled_from((16, 32, 64, 128)),
)
def test_splits_cover_the_longest(seen: list[int], programs: int, keys: int) -> None:
    size, splits = split_decode(np.array(seen), programs, keys, 132, None)
    assert (splits - 1) * size < max(seen) <= splits * size
    assert size % keys == 0
    assert size >= MIN_SPLIT
    assert splits <= MAX_SPLITS


def test_a_lone_request_is_split_and_a_full_batch_is_not() -> None:
    assert split_decode(np.array([32_000]), 8, 64, 132, None)[1] == 32  # 256 programs for 132 multiprocessors
    assert split_decode(np.full(256, 1000), 8, 64, 132, None)[1] == 1


def test_fixed_split() -> None:
    assert split_decode(np.array([100, 40]), 8, 16, 132, 32) == (32, 4)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256, MAX_HEAD_DIM])
@pytest.mark.parametrize("group", [1, 3, 8, 71, MAX_GROUP])
def test_blocks(dim: int, group: int, itemsize: int) -> None:
    kind = Kind.of(make_layer(group, 1, dim))
    for new in (2, 40, 4000):
        blocks = extend_blocks(kind, itemsize, new * group, OPTIONS)
        assert blocks.rows >= group, "a token's query heads fit into a tile"
        assert blocks.rows <= max(128, group)
        assert all(side == power_of_two(side) for side in (blocks.rows, blocks.keys))
    blocks = decode_blocks(kind, itemsize, OPTIONS)
    assert 16 <= blocks.rows <= 64
    assert blocks.keys == power_of_two(blocks.keys)


def test_options_override_blocks() -> None:
    options = TritonAttentionOptions(block_rows=32, block_keys=16)
    kind = Kind.of(make_layer())
    assert extend_blocks(kind, 2, 4000, options).rows == 32
    assert extend_blocks(kind, 2, 4000, options).keys == decode_blocks(kind, 2, options).keys == 16


@pytest.mark.parametrize("bad", [0, 8, 48, -16])
def test_blocks_are_powers_of_two(bad: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        TritonAttentionOptions(block_keys=bad)
