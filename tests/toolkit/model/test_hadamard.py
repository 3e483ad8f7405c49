"""Keys by a Hadamard matrix: what stays as it is, and how much less 8 bits cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.toolkit.model.hadamard import matrix, transformed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Draw the same numbers each time, whatever has drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pool_of(dim: int, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[MHAPool, LayerSpec]:
    layer = LayerSpec(
        layer_id=0, kv_group=0, num_heads=4, num_kv_heads=2, qk_head_dim=dim, v_head_dim=dim, scale=dim**-0.5
    )
    return MHAPool(NoOptions(), KVPoolContext(8, 1, (layer,), dtype, CPU)), layer


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, keys] in float64."""
    return torch.einsum("thd,khd->thk", q.double(), k.double().repeat_interleave(2, 1))


@pytest.mark.parametrize("size", [16, 64])
def test_matrix(size: int) -> None:
    """Sylvester's: the sign of an entry is the parity of the bits that its row and column have in common."""
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    torch.testing.assert_close(matrix(size, CPU) * size**0.5, signs)
    torch.testing.assert_close(matrix(size, CPU) @ matrix(size, CPU), torch.eye(size))


def rounding(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, keys]: how far rounding to float32 may move a score, 6 u |q| |k| with u = 2^-24.

    An entry of a transformed vector is a sum of n products of either sign. Added one by one, which is the worst order,
    the sum of j of them is about |q| sqrt(j) / n, and is rounded by up to u of that. The roundings of q and of k give a
    score a standard deviation of u |q| |k| / sqrt(3), whatever n is; six of these are 3.5 u |q| |k|. The entries of the
    matrix are rounded as well, by up to u: 2 u |q| |k| for both. With TF32 scores are off by 200 times as much.
    """
    norms = (q.double().norm(dim=-1), k.double().norm(dim=-1).repeat_interleave(2, 1))
    return 6 * 2.0**-24 * torch.einsum("th,kh->thk", *norms)


@pytest.mark.parametrize(("dim", "changed"), [(64, True), (96, True), (256, True), (40, False), (20, False)])
def test_scores_stay(dim: int, changed: bool) -> None:
    """In blocks where heads are no power of two wide; where these would be small nothing happens."""
    pool, layer = pool_of(dim)
    q, k = torch.randn(5, 4, dim), torch.randn(7, 2, dim)
    found = transformed(q, k, layer, pool)
    assert torch.equal(found[0], q) is torch.equal(found[1], k) is not changed
    assert bool(((scores(*found) - scores(q, k)).abs() <= rounding(q, k)).all())


def test_which_pools() -> None:
    """Neither those of 16 bits nor those with the scales of a checkpoint."""
    q, k = torch.randn(5, 4, 64), torch.randn(7, 2, 64)
    (plain, layer), (scaled, _) = pool_of(64, torch.bfloat16), pool_of(64)
    scaled.set_scales(0, 0.5, 1.0)
    for pool in (plain, scaled):
        assert transformed(q, k, layer, pool) == (q, k)


def test_large_channels_cost_less() -> None:
    """Where some channels of queries and keys are large, as those are that rotation turns slowly."""
    pool, layer = pool_of(64)
    sizes = torch.ones(64)
    sizes[[5, 30, 37, 62]] = 12.0
    q, k = torch.randn(64, 4, 64) * sizes, torch.randn(64, 2, 64) * sizes

    def error(q: torch.Tensor, k: torch.Tensor) -> float:
        pool.write(0, torch.arange(2, 8), k[:6], k[:6])
        kept = pool.keys(0)[2:8].float()
        return float((scores(q, kept) - scores(q, k[:6])).square().mean().sqrt())

    assert error(*transformed(q, k, layer, pool)) < 0.6 * error(q, k)


def test_nan_stays_with_its_token() -> None:
    pool, layer = pool_of(64)
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    k[3, 1, 7] = torch.nan
    _, found = transformed(q, k, layer, pool)
    assert found.isnan().any(-1).nonzero().tolist() == [[3, 1]]
