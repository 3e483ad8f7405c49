from __future__ import annotations

import itertools

import psutil
import pytest
import torch

from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.memory_paged import pool as pool_module
from pegboard.plugins.memory_paged.pool import MHAPool

LAYERS = (
    LayerSpec(layer_id=0, num_heads=4, num_kv_heads=2, qk_head_dim=8, v_head_dim=8, scale=1.0),
    LayerSpec(layer_id=3, num_heads=4, num_kv_heads=1, qk_head_dim=16, v_head_dim=4, scale=1.0),
)


def make(dtype: torch.dtype = torch.float32, layers: tuple[LayerSpec, ...] = LAYERS) -> MHAPool:
    return MHAPool(NoOptions(), KVPoolContext(5, 4, layers, dtype, torch.device("cpu")))


def test_shapes_follow_each_layer() -> None:
    pool = make()
    assert pool.num_slots == 24
    assert (pool.keys(0).shape, pool.values(0).shape) == ((24, 2, 8), (24, 2, 8))
    assert (pool.keys(3).shape, pool.values(3).shape) == ((24, 1, 16), (24, 1, 4))
    assert all(buffer.is_contiguous() for buffer in (pool.keys(0), pool.values(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_told_before_and_after(dtype: torch.dtype) -> None:
    pool = make(dtype)
    per_token = MHAPool.bytes_per_token(LAYERS, dtype)
    assert per_token == dtype.itemsize * (2 * 16 + 20)
    assert pool.nbytes == per_token * pool.num_slots


def test_a_write_reaches_its_slots_and_no_other() -> None:
    pool = make()
    pool.keys(3).fill_(torch.nan)
    pool.values(3).fill_(torch.nan)
    before = pool.keys(0).clone()
    slots = torch.tensor([9, 4, 23])
    k, v = torch.randn(3, 1, 16), torch.randn(3, 1, 4)
    pool.write(3, slots, k, v)
    torch.testing.assert_close(pool.keys(3)[slots], k, rtol=0, atol=0)
    torch.testing.assert_close(pool.values(3)[slots], v, rtol=0, atol=0)
    assert int(pool.keys(3).isnan().all(-1).sum()) == int(pool.values(3).isnan().all(-1).sum()) == 21
    torch.testing.assert_close(pool.keys(0), before, rtol=0, atol=0, equal_nan=True)


def test_buffers_are_not_copies_and_page_themselves() -> None:
    pool = make()
    paged = pool.keys(0).view(6, 4, 2, 8)
    pool.write(0, torch.tensor([4 * 2 + 3]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert bool((paged[2, 3] == 1).all())


def test_page_zero_starts_finite() -> None:
    pool = make()
    assert not pool.keys(0)[:4].any()
    assert not pool.values(3)[:4].any()


def test_a_write_is_cast_to_the_pool() -> None:
    pool = make(torch.bfloat16)
    pool.write(0, torch.tensor([5]), torch.full((1, 2, 8), 1.5), torch.full((1, 2, 8), 2.5))
    assert pool.keys(0)[5, 0, 0] == 1.5
    assert pool.values(0)[5, 1, 7] == 2.5


def test_an_empty_write_is_fine_and_a_wrong_shape_is_not() -> None:
    pool = make()
    pool.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 8), torch.empty(0, 2, 8))
    with pytest.raises((RuntimeError, IndexError)):
        pool.write(0, torch.tensor([4, 5]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def test_two_layers_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="two layers have the id 0"):
        make(layers=(LAYERS[0], LAYERS[0]))


def large() -> MHAPool:
    """64 MiB: 4,096 slots of 8 KiB in each of two buffers."""
    layer = LayerSpec(layer_id=0, num_heads=4, num_kv_heads=4, qk_head_dim=512, v_head_dim=512, scale=1.0)
    return MHAPool(NoOptions(), KVPoolContext(4095, 1, (layer,), torch.float32, torch.device("cpu")))


def test_memory_comes_when_it_is_prepared() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = large()
    made = process.memory_info().rss
    assert pool.prepare(60.0) == pool.num_slots == 4096
    assert made - before < 16 * 2**20
    assert process.memory_info().rss - made > 48 * 2**20


def test_preparing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ticks = large(), itertools.count()
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: float(next(ticks)))  # type: ignore[attr-defined]
    # Two MiB of each buffer are 256 slots; the clock is looked at before each such step, and once at the beginning.
    assert pool.prepare(4.5) == 4 * 256
    assert pool.prepare(0.0) == 0


def test_buffers_begin_at_large_pages() -> None:
    pool = large()
    assert pool.keys(0).data_ptr() % 2**21 == pool.values(0).data_ptr() % 2**21 == 0
    assert pool.keys(0).data_ptr() != pool.values(0).data_ptr()
