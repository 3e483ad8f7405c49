"""What the kernels of a batch with prompts work on, listed on the device, against lists that Python makes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import CPU, AttentionRig, make_layer
from pegboard.conformance.properties import properties
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.blocks import Device, Kind
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.plugins.attn_triton.planning import ExtendLaunch, Places, Tiling, decodes_of, split
from pegboard.toolkit.graphs import StaticExtend

LAYER = make_layer(4, 2)
Request = tuple[int, int, int]
"""Tokens of KV before the batch, new tokens, and those of them that are in a tail."""


def batch_of(requests: Sequence[Request], mode: ForwardMode = ForwardMode.MIXED) -> ForwardBatch:
    rig = AttentionRig([LAYER], [one[:2] for one in requests])
    batch = rig.batch(TritonAttention(TritonAttentionOptions(), rig.context_for()), mode)
    tails = torch.tensor([one[2] for one in requests])
    if tails.any():
        batch.tail_lens, batch.tail_lens_cpu = tails, tails.numpy()
    return batch


def launches_of(batch: ForwardBatch, rows: int = 16) -> dict[bool, ExtendLaunch]:
    """Return a batch's extends, in tiles of `rows` queries, by whether they are of requests with a tail."""
    found = split(batch, torch.arange(batch.batch_size)).extending
    if found is None:
        return {}
    tiling = Tiling(batch, found, Device(4, 4, (9, 0)), TritonAttentionOptions(block_rows=rows), Places())
    return {one.tails: one for one in tiling.launches(Kind.of(LAYER))}


def tiles_of(requests: Sequence[Request], wanted: Sequence[int], tokens: int) -> list[list[int]]:
    """Those with the most keys first; of each request its last tokens first."""
    order = sorted(wanted, key=lambda one: (-sum(requests[one][:2]), one))
    return [[one, first] for one in order for first in reversed(range(0, requests[one][1], tokens))]


@st.composite
def batches(draw: st.DrawFn) -> list[Request]:
    def one(news: Request) -> Request:
        prefix, new, tail = news
        return prefix, new, new if tail else 0

    numbers = st.tuples(st.integers(0, 40), st.sampled_from((1, 1, 2, 7, 8, 9, 30)), st.booleans().map(int))
    return [one(news) for news in draw(st.lists(numbers, min_size=1, max_size=6))]


@properties(max_examples=25)
@given(requests=batches())
@example(requests=[(0, 30, 0), (3, 1, 0), (12, 18, 0), (0, 8, 0), (9, 1, 1), (22, 8, 8)])
def test_lists_are_those_of_the_batch(requests: list[Request]) -> None:
    batch = batch_of(requests)
    found = launches_of(batch)
    for tails in (False, True):
        wanted = [at for at, (_, new, tail) in enumerate(requests) if (tail > 0) == tails and (tails or new > 1)]
        assert (tails in found) == bool(wanted)
        if wanted:
            assert found[tails].tiles.tolist() == tiles_of(requests, wanted, found[tails].tokens)
    single = [at for at, (_, new, tail) in enumerate(requests) if new == 1 and not tail]
    first = torch.arange(len(requests))
    decoding = decodes_of(batch, split(batch, first), first, Places())
    if not single:
        assert decoding is None
        return
    assert decoding is not None
    starts = batch.extend_start_loc
    assert starts is not None
    assert decoding.rows.tolist() == batch.req_pool_indices[single].tolist()
    assert decoding.seq_lens.tolist() == batch.seq_lens[single].tolist()
    assert decoding.tokens.tolist() == starts[single].tolist()


def test_more_requests_than_a_program_sees_at_once() -> None:
    requests = [(at % 5, 1 + at % 3, 0) for at in range(140)]
    batch = batch_of(requests)
    tiles = launches_of(batch)[False]
    assert tiles.tiles.tolist() == tiles_of(requests, [at for at in range(140) if at % 3], tiles.tokens)
    first = torch.arange(140)
    decoding = decodes_of(batch, split(batch, first), first, Places())
    assert decoding is not None
    assert decoding.rows.tolist() == batch.req_pool_indices[::3].tolist()


@pytest.mark.parametrize(
    "requests",
    [[(0, 30, 0), (3, 1, 0), (12, 5, 0)], [(9, 1, 0)], [(1, 1, 0), (0, 38, 0), (5, 1, 0)], [(0, 2, 0), (7, 3, 0)]],
    ids=str,
)
def test_a_graph_has_room_for_any_batch(requests: list[Request]) -> None:
    """Behind what there is stand tiles of the last request, which has no keys, and single tokens without any. All
    batches find their lists at the same addresses.
    """
    batch, places, table = batch_of(requests), Places(), torch.zeros((9, 90), dtype=torch.int32)
    static = StaticExtend(40, 3, 5, (table,), batch.kv_pool, batch.attn_backend)
    addresses = []
    for each in (batch_of([(0, 13, 0), (2, 1, 0), (0, 26, 0)]), batch):
        fixed = static.fill(each)
        found = split(fixed, torch.arange(0))
        assert found.extending is not None
        tiling = Tiling(fixed, found.extending, Device(4, 4, (9, 0)), TritonAttentionOptions(block_rows=16), places)
        (tiles,) = tiling.launches(Kind.of(LAYER))
        decoding = decodes_of(fixed, found, torch.arange(0), places)
        assert decoding is not None
        addresses.append((tiles.tiles.data_ptr(), decoding.rows.data_ptr()))
    assert decoding is not None
    assert addresses[0] == addresses[1]
    assert len(tiles.tiles) == 40 // 8 + 2, "three requests may leave a tile nearly empty each"
    wanted = tiles_of(requests, [at for at, (_, new, _) in enumerate(requests) if new > 1], tiles.tokens)
    assert tiles.tiles.tolist() == [*wanted, *[[8, 0]] * (len(tiles.tiles) - len(wanted))]
    single = [at for at, (_, new, _) in enumerate(requests) if new == 1]
    assert decoding.rows.tolist() == [*batch.req_pool_indices[single].tolist(), *[0] * (5 - len(single))]
    assert decoding.seq_lens.tolist() == [*batch.seq_lens[single].tolist(), *[0] * (5 - len(single))]


def test_more_tiles_than_are_written_at_once() -> None:
    requests = [(0, 9 * 128, 0), (4, 2, 0)]
    tiles = launches_of(batch_of(requests))[False]
    assert len(tiles.tiles) > 128
    assert tiles.tiles.tolist() == tiles_of(requests, [0, 1], tiles.tokens)


@pytest.mark.parametrize("tailed", [0, 2])
def test_decodes_of_which_some_have_a_tail(tailed: int) -> None:
    requests = [(4, 1, 0), (9, 1, tailed), (2, 1, 0)]
    batch = batch_of(requests, ForwardMode.DECODE)
    first = torch.arange(3, device=CPU)
    decoding = decodes_of(batch, split(batch, first), first, Places())
    assert decoding is not None
    kept = [0, 2] if tailed else [0, 1, 2]
    assert decoding.rows.tolist() == batch.req_pool_indices[kept].tolist()
    assert decoding.tokens.tolist() == kept
    tiles = launches_of(batch)
    assert [one.tiles.tolist() for one in tiles.values()] == ([[[1, 0]]] if tailed else [])
