"""Sizes of graphs, and batches in fixed places."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import QuietPool
from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import BatchStates, ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.toolkit import graphs
from pegboard.toolkit.graphs import (
    StaticBatch,
    StaticExtend,
    default_sizes,
    extra_shapes,
    padded,
    prefill_sizes,
    states_fit,
)
from pegboard.toolkit.model.states import decode_states

CPU = torch.device("cpu")
TABLE = torch.zeros((9, 16), dtype=torch.int32)


def make_pool() -> QuietPool:
    return QuietPool(None, KVPoolContext(1, 1, (), torch.float32, CPU))


def make_attention() -> FixedAttention:
    return FixedAttention(NoOptions(), AttentionContext((), 1, torch.float32, CPU, 8, 16))


def decode(count: int, seed: int) -> ForwardBatch:
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 9, (5, count), generator=draw)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=numbers[0],
        positions=numbers[1],
        req_pool_indices=numbers[2],
        seq_lens=numbers[1] + 1,
        seq_lens_cpu=(numbers[1] + 1).numpy(),
        kv_groups=(KVGroupView(TABLE, numbers[3]),),
        kv_pool=make_pool(),
        attn_backend=make_attention(),
        extras={"test.one": numbers[4], "test.two": torch.rand(count, 3)},
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (0, []),
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (300, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), 288, 300]),
    ],
)
def test_default_sizes(most: int, sizes: list[int]) -> None:
    assert list(default_sizes(most)) == sizes


def test_the_next_larger_size() -> None:
    sizes = (2, 4, 16)
    assert [padded(count, sizes) for count in (1, 2, 3, 5, 16, 17)] == [2, 2, 4, 16, 16, None]
    assert padded(1, ()) is None


def test_extras_that_have_a_part_for_each_request() -> None:
    batch = decode(3, 0)
    assert extra_shapes(batch) == (("test.one", torch.int64, ()), ("test.two", torch.float32, (3,)))
    for other in (torch.ones(2), torch.tensor(3.0), np.ones(3), 3, None):
        batch.extras["test.other"] = other
        assert extra_shapes(batch) is None, f"{other!r} would be frozen in a graph"


def test_everything_but_the_batch_is_padding() -> None:
    """Whatever stood there, and always at the same addresses."""
    first = decode(8, 1)
    pool, attention = make_pool(), make_attention()
    shapes = extra_shapes(first)
    assert shapes is not None
    static = StaticBatch(8, (TABLE,), pool, attention, shapes)
    fixed = static.batch
    places = [one.data_ptr() for one in _numbers(fixed)]
    assert (fixed.real_size, fixed.fixed, fixed.kv_pool, fixed.attn_backend) == (0, True, pool, attention)
    for count, seed in ((8, 1), (3, 2), (5, 3), (1, 4), (8, 5)):
        batch = decode(count, seed)
        assert static.fill(batch) is fixed
        assert [one.data_ptr() for one in _numbers(fixed)] == places
        assert (fixed.batch_size, fixed.real_size) == (8, count)
        for mine, other in zip(_numbers(fixed), _numbers(batch), strict=True):
            assert torch.equal(mine[:count], other)
            assert bool((mine[count:] == (1 if mine is fixed.seq_lens else 0)).all())
        assert fixed.seq_lens_cpu.tolist() == fixed.seq_lens.tolist()
        assert fixed.kv_groups[0].row_table is TABLE


def states(memory: dict[str, torch.Tensor], *slots: int, firsts: tuple[int, ...] | None = None) -> BatchStates:
    """One token each, whose states are read from `slots` and written to those before."""
    sources = torch.tensor(slots)
    found = decode_states(memory, sources, sources - 1)
    return found if firsts is None else replace(found, rounds=(replace(found.rounds[0], firsts=np.array(firsts)),))


def test_states_of_padding_are_in_slot_0() -> None:
    memory = {"a": torch.full((9, 2), torch.nan), "b": torch.full((9,), torch.nan)}
    static = StaticBatch(4, (TABLE,), make_pool(), make_attention(), (), memory)
    assert [bool(one[0].isfinite().all()) for one in memory.values()] == [True, True]
    assert static.batch.states is not None
    fixed = static.batch.states.rounds[0]
    places = fixed.sources.data_ptr(), fixed.targets.data_ptr()
    for slots in ((3, 2, 7, 4), (5,), (8, 6, 1)):
        batch = decode(len(slots), 1)
        batch.states = states(memory, *slots)
        assert static.fill(batch).states is static.batch.states
        rest = [0] * (4 - len(slots))
        assert fixed.sources.tolist() == [*slots, *rest]
        assert fixed.targets.tolist() == [*(slot - 1 for slot in slots), *rest]
        assert (fixed.sources.data_ptr(), fixed.targets.data_ptr()) == places
    assert static.batch.states.memory is memory
    assert (fixed.firsts.tolist(), fixed.lengths.tolist(), fixed.fresh) == ([0, 1, 2, 3], [1] * 4, None)


def test_which_states_fit() -> None:
    memory = {"a": torch.zeros(9)}
    plain = states(memory, 3, 2)
    assert states_fit(None, None)
    assert states_fit(plain, memory)
    assert not states_fit(plain, None)
    assert not states_fit(None, memory)
    assert not states_fit(plain, dict(memory))
    assert not states_fit(states(memory, 3, 2, firsts=(1, 0)), memory)
    assert not states_fit(replace(plain, rounds=plain.rounds * 2), memory)
    begins = replace(plain.rounds[0], fresh=torch.tensor([False, True]))
    assert not states_fit(replace(plain, rounds=(begins,)), memory)


def _numbers(batch: ForwardBatch) -> list[torch.Tensor]:
    own = [batch.input_ids, batch.positions, batch.req_pool_indices, batch.seq_lens]
    return [*own, batch.kv_groups[0].out_cache_loc, *(batch.extras[name] for name in sorted(batch.extras))]


def test_a_cpu_records_nothing_unless_a_test_does() -> None:
    assert graphs.capture_of(CPU) is None
    with graphs.recorded("cpu", lambda device: TapeCapture()):
        assert isinstance(graphs.capture_of(CPU), TapeCapture)
    assert graphs.capture_of(CPU) is None


def extend(*requests: tuple[int, int], seed: int = 0) -> ForwardBatch:
    """Return an extend batch of requests with so many tokens of KV, and new ones."""
    draw = torch.Generator().manual_seed(seed)
    prefix, new = (torch.tensor(one) for one in zip(*requests, strict=True))
    tokens, count = int(new.sum()), len(requests)

    def numbers(size: int) -> torch.Tensor:
        return torch.randint(1, 9, (size,), generator=draw)

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=count,
        input_ids=numbers(tokens),
        positions=numbers(tokens),
        req_pool_indices=numbers(count),
        seq_lens=prefix + new,
        seq_lens_cpu=(prefix + new).numpy(),
        kv_groups=(KVGroupView(TABLE, numbers(tokens)),),
        kv_pool=make_pool(),
        attn_backend=make_attention(),
        extend_lens=new,
        extend_prefix_lens=prefix,
        extend_start_loc=new.cumsum(0) - new,
        extend_lens_cpu=new.numpy(),
        extend_prefix_lens_cpu=prefix.numpy(),
    )


def _extend_numbers(batch: ForwardBatch) -> list[torch.Tensor]:
    """Return an extend batch's numbers by token, and by request."""
    lengths = batch.extend_lens, batch.extend_prefix_lens, batch.extend_start_loc
    by_token = [batch.input_ids, batch.positions, batch.kv_groups[0].out_cache_loc]
    return [*by_token, batch.req_pool_indices, batch.seq_lens, *(one for one in lengths if one is not None)]


def test_everything_but_the_prefill_is_padding() -> None:
    """Whatever stood there, and always at the same addresses."""
    pool, attention = make_pool(), make_attention()
    static = StaticExtend(12, 2, 3, (TABLE,), pool, attention)
    fixed = static.batch
    places = [one.data_ptr() for one in _extend_numbers(fixed)]
    assert (fixed.batch_size, fixed.num_tokens, fixed.prefills, fixed.fixed) == (6, 12, 2, True)
    assert fixed.forward_mode is ForwardMode.MIXED
    assert StaticExtend(12, 2, 0, (TABLE,), pool, attention).batch.forward_mode is ForwardMode.EXTEND
    for seed, requests in enumerate((((0, 6), (3, 1), (4, 5)), ((1, 2),), ((5, 1), (0, 1), (2, 1)), ((0, 12),))):
        batch = extend(*requests, seed=seed)
        assert static.has_room(batch)
        assert static.fill(batch) is fixed
        assert fixed.real_size == len(requests)
        assert [one.data_ptr() for one in _extend_numbers(fixed)] == places
        for mine, other in zip(_extend_numbers(fixed), _extend_numbers(batch), strict=True):
            assert torch.equal(mine[: len(other)], other)
            assert not mine[len(other) :].any()
        for device, host in (
            (fixed.seq_lens, fixed.seq_lens_cpu),
            (fixed.extend_lens, fixed.extend_lens_cpu),
            (fixed.extend_prefix_lens, fixed.extend_prefix_lens_cpu),
        ):
            assert device is not None
            assert host is not None
            assert device.tolist() == host.tolist()


def test_what_a_prefill_has_room_for() -> None:
    static = StaticExtend(12, 2, 1, (TABLE,), make_pool(), make_attention())
    assert static.has_room(extend((0, 5), (0, 6), (9, 1)))
    for requests in (((0, 13),), ((0, 2), (0, 2), (0, 2)), ((3, 1), (4, 1))):
        assert not static.has_room(extend(*requests))


def test_sizes_of_prefills() -> None:
    """From 65 tokens on a third of a graph is padding at most, from 193 on a quarter."""
    sizes = prefill_sizes()
    assert sizes[:8] == (16, 32, 64, 96, 128, 192, 256, 320)
    assert sizes[-4:] == (1280, 1536, 1792, 2048)
    assert prefill_sizes(300) == (16, 32, 64, 96, 128, 192, 256)
    padding = {before + 1: (after - before - 1) / after for before, after in pairwise(sizes)}
    assert max(share for tokens, share in padding.items() if tokens >= 65) < 1 / 3
    assert max(share for tokens, share in padding.items() if tokens >= 193) < 1 / 4
