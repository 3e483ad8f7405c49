"""Products with weights in every format, for every instruction set, against float64."""

from __future__ import annotations

import pytest
import torch

from pegboard.plugins.cpu_native.library import load
from pegboard.plugins.cpu_native.model import FORMATS
from tests.plugins.cpu_native.instruction_sets import SETS

SHAPES = [
    *[(1, 576), (2, 576), (3, 96), (16, 576), (17, 100), (32, 576)],
    *[(33, 576), (70, 100), (200, 1536), (700, 1536), (1100, 576)],
]
"""Rows on the left and columns: each way to multiply, weights in several parts, and groups of rows."""


def multiply(name: str, kept: str, w: torch.Tensor, a: torch.Tensor, threads: int = 2) -> tuple[torch.Tensor, int]:
    """a * w^T, and the format that the weights came to be in."""
    out = torch.full((a.shape[0], w.shape[0]), float("nan"))
    n, k = w.shape
    arguments = (threads, FORMATS[kept], w.data_ptr(), n, k, a.data_ptr(), a.shape[0], out.data_ptr())
    return out, load(name).pb_multiply(*arguments)


def numbers(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def odd(w: torch.Tensor) -> torch.Tensor:
    """With what weights may be besides bell-shaped: zeros of both signs, numbers far smaller and far larger, a
    subnormal one, rows of nothing.
    """
    w = w.clone()
    w[1] = 0
    w[2, ::3] = -0.0
    w[3, 5] = 1e-30
    w[4, 7] = -3e20
    w[5, 9] = 1e-39
    w[-1, -1] = 2.0**-20
    return w


def close(found: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> None:
    """Within what float32 sums of exact products may be off: some roundings of the largest partial sum."""
    exact = a.double() @ w.double().T
    bound = a.double().abs() @ w.double().abs().T
    assert bool(((found.double() - exact).abs() <= 4e-6 * bound + 1e-30).all())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kept", ["bf16", "plain"])
def test_nothing_is_lost(name: str, rows: int, columns: int, kept: str) -> None:
    w, a = odd(numbers(70, columns, 1, 0.05)), numbers(rows, columns, 2)
    found, came = multiply(name, kept, w, a)
    close(found, w, a)
    compressed = kept == "bf16" and name != "avx2"
    assert came == FORMATS["bf16" if compressed else "plain"]


@pytest.mark.parametrize("name", SETS)
def test_any_sixteen_bits(name: str) -> None:
    """Weights of all exponents do not fit into twelve bits, and stay as they are."""
    draw = torch.Generator().manual_seed(3)
    w = torch.exp2(torch.randint(-60, 60, (64, 96), generator=draw).float()).bfloat16()
    a = numbers(5, 96, 4)
    found, came = multiply(name, "bf16", w, a)
    close(found, w, a)
    assert came == FORMATS["plain"]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_int8(name: str, rows: int, columns: int) -> None:
    """Off by no more than half a step of each weight, and bf16's rounding of what it becomes."""
    w, a = numbers(70, columns, 5, 0.05), numbers(rows, columns, 6)
    w[3] = 0
    found, _ = multiply(name, "int8", w, a)
    padded = torch.nn.functional.pad(w.double(), (0, -columns % 32)).unflatten(1, (-1, 32))
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).flatten(1)[:, :columns]
    error = 0.51 * step + w.double().abs() * 2**-8
    exact, bound = a.double() @ w.double().T, a.double().abs() @ error.T
    assert bool(((found.double() - exact).abs() <= bound + 1e-6).all())
    # And as small as that of 8 bits should be: the root of the mean square over all of them.
    scale = float(exact.square().mean().sqrt())
    assert float((found.double() - exact).square().mean().sqrt()) < 0.012 * scale


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 160), (40, 160), (400, 1536)])
def test_threads_change_nothing(kept: str, rows: int, columns: int) -> None:
    """Whoever takes a part of the work, and where there are more threads than parts."""
    w, a = numbers(200, columns, 7), numbers(rows, columns, 8)
    one, _ = multiply(SETS[0], kept, w, a, threads=1)
    assert all(torch.equal(one, multiply(SETS[0], kept, w, a, threads=n)[0]) for n in (2, 3, 7))


@pytest.mark.parametrize("kept", FORMATS)
def test_infinities_stay(kept: str) -> None:
    if kept == "int8":
        pytest.skip("there is no scale for them")
    w, a = numbers(40, 64, 9), numbers(3, 64, 10).abs()
    w[7, 3] = float("inf")
    found, _ = multiply(SETS[0], kept, w, a)
    assert bool(torch.isinf(found[:, 7]).all())
    assert bool(torch.isfinite(found[:, :7]).all())
