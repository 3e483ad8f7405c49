"""Shapes of launches, which need no triton."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.properties import properties
from pegboard.plugins.attn_triton.blocks import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    Device,
    Kind,
    decode_blocks,
    extend_blocks,
    power_of_two,
)
from pegboard.plugins.attn_triton.launch import (
    LEAST_PART,
    LONG_PART,
    LONG_PARTS,
    MAX_PARTS,
    cut,
    most_parts,
    prefix_parts,
)
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

OPTIONS = TritonAttentionOptions()


@properties()
@given(programs=st.integers(1, 5000), longest=st.integers(1, 200_000), least=st.sampled_from((16, 128, 256)))
def test_most_parts(programs: int, longest: int, least: int) -> None:
    """A power of two that keeps 132 multiprocessors busy, unless there is too little to read."""
    parts = most_parts(programs, 132, longest, least)
    assert parts == power_of_two(parts, 1) <= MAX_PARTS
    assert programs * parts >= 2 * 132 or parts * least >= longest or parts == MAX_PARTS
    assert parts == 1 or programs * parts < 4 * 132
    assert parts == 1 or (parts - 1) * least < 2 * longest


def test_a_lone_request_is_split_and_a_full_batch_is_not() -> None:
    assert most_parts(8, 132, 32_000, LEAST_PART) == 64
    assert most_parts(256 * 8, 132, 32_000, LEAST_PART) == 1
    assert most_parts(8, 132, LEAST_PART, LEAST_PART) == 1, "there is nothing to split"


def test_only_long_requests_are_cut_where_there_are_many() -> None:
    """The batch's size decides into how many parts, and each request's own length into how many of them."""
    assert cut(8, 132, 32_000, LEAST_PART) == (64, LEAST_PART)
    assert cut(64 * 8, 132, 32_000, LEAST_PART) == (LONG_PARTS, LONG_PART)
    assert cut(64 * 8, 132, 3_000, LEAST_PART) == (4, LONG_PART)
    assert cut(64 * 8, 132, LONG_PART, LEAST_PART) == (1, LEAST_PART), "none can be longer than a part"


@properties()
@given(prefix=st.integers(1, 100_000), programs=st.integers(1, 300), keys=st.sampled_from((16, 64)))
def test_parts_cover_a_prefix(prefix: int, programs: int, keys: int) -> None:
    parts, size = prefix_parts(prefix, programs, 132, keys, LEAST_PART)
    assert (parts - 1) * size < prefix <= parts * size
    assert size % keys == 0
    assert parts <= MAX_PARTS


@pytest.mark.parametrize("itemsizes", [(2, 2), (4, 4), (2, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256, MAX_HEAD_DIM])
@pytest.mark.parametrize("group", [1, 3, 8, 71, MAX_GROUP])
def test_blocks(dim: int, group: int, itemsizes: tuple[int, int]) -> None:
    kind = Kind.of(make_layer(group, 1, dim))
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        device = Device(*itemsizes, capability)
        for new in (2, 40, 4000):
            blocks = extend_blocks(kind, device, new * group, OPTIONS)
            assert blocks.rows >= group, "a token's query heads fit into a tile"
            assert blocks.rows <= max(128, power_of_two(group))
            assert all(side == power_of_two(side) for side in (blocks.rows, blocks.keys))
        blocks = decode_blocks(kind, device, OPTIONS)
        assert 16 <= blocks.rows <= 64
        assert blocks.keys == power_of_two(blocks.keys)


def test_options_override_blocks() -> None:
    options = TritonAttentionOptions(block_rows=32, block_keys=16)
    kind, device = Kind.of(make_layer()), Device(2, 2, (9, 0))
    assert extend_blocks(kind, device, 4000, options).rows == 32
    assert extend_blocks(kind, device, 4000, options).keys == decode_blocks(kind, device, options).keys == 16


@pytest.mark.parametrize("bad", [0, 8, 48, -16])
def test_blocks_are_powers_of_two(bad: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        TritonAttentionOptions(block_keys=bad)


@pytest.mark.parametrize("bad", [0, 3, 128])
def test_parts_are_powers_of_two(bad: int) -> None:
    with pytest.raises(ValueError, match=r"power of two|less than or equal to 64"):
        TritonAttentionOptions(kv_parts=bad)
