"""Sizes of graphs, and batches in fixed places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.conformance.attention_fakes import QuietPool
from pegboard.conformance.fixed_attention import FixedAttention
from pegboard.conformance.tape import TapeCapture
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.toolkit import graphs
from pegboard.toolkit.graphs import StaticBatch, default_sizes, extra_shapes, padded

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


def _numbers(batch: ForwardBatch) -> list[torch.Tensor]:
    own = [batch.input_ids, batch.positions, batch.req_pool_indices, batch.seq_lens]
    return [*own, batch.kv_groups[0].out_cache_loc, *(batch.extras[name] for name in sorted(batch.extras))]


def test_a_cpu_records_nothing_unless_a_test_does() -> None:
    assert graphs.capture_of(CPU) is None
    with graphs.recorded("cpu", lambda device: TapeCapture()):
        assert isinstance(graphs.capture_of(CPU), TapeCapture)
    assert graphs.capture_of(CPU) is None
