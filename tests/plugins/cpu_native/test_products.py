"""Products with weights in every format, for every instruction set, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pegboard.plugins.cpu_native.library import FORMATS, Weights, load
from pegboard.plugins.cpu_native.model import WANTED
from tests.plugins.cpu_native.instruction_sets import EACH, SETS

SHAPES = [
    *[(1, 576), (2, 576), (3, 96), (16, 576), (17, 100), (32, 576)],
    *[(33, 576), (70, 100), (200, 1536), (700, 1536), (1100, 576)],
]
"""Rows on the left and columns: each way to multiply, weights in several parts, and groups of rows."""


def multiply(name: str, kept: str, w: torch.Tensor, a: torch.Tensor, threads: int = 2) -> tuple[torch.Tensor, str]:
    """a * w^T, and the format that the weights came to be in."""
    out = torch.full((a.shape[0], w.shape[0]), float("nan"))
    n, k = w.shape
    numbers = Weights(numbers=w.data_ptr())
    arguments = (threads, WANTED[kept], ctypes.byref(numbers), n, k, a.data_ptr(), a.shape[0], out.data_ptr())
    return out, FORMATS[load(name).pb_multiply(*arguments)]


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
    """Within what float32 sums of exact products may be off. For n products of one sign, added one after another, it
    is 2 sqrt(n) 2^-24 of their sum, 3e-6 for 576 and 5e-6 for 1536; for either sign, which these have, much less.
    """
    exact = a.double() @ w.double().T
    bound = a.double().abs() @ w.double().abs().T
    assert bool(((found.double() - exact).abs() <= 4e-6 * bound + 1e-30).all())


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kept", ["bf16", "bf12", "plain"])
def test_nothing_is_lost(name: str, rows: int, columns: int, kept: str) -> None:
    w, a = odd(numbers(70, columns, 1, 0.05)), numbers(rows, columns, 2)
    found, came = multiply(name, kept, w, a)
    close(found, w, a)
    compressed = kept != "plain" and name != "avx2"
    assert came == ("bf12" if compressed else "bf16")


@pytest.mark.parametrize("name", EACH)
def test_any_sixteen_bits(name: str) -> None:
    """Weights of all exponents do not fit into twelve bits, and stay as they are."""
    draw = torch.Generator().manual_seed(3)
    w = torch.exp2(torch.randint(-60, 60, (64, 96), generator=draw).float()).bfloat16()
    a = numbers(5, 96, 4)
    found, came = multiply(name, "bf16", w, a)
    close(found, w, a)
    assert came == "bf16"


@pytest.mark.parametrize("name", EACH)
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


def on_grids(rows: int, columns: int, bits: int, seed: int, scale: float = 0.01) -> torch.Tensor:
    """As a GGUF file has weights, of Q4_1 or Q8_0, once they are bf16: every 32 of a row are float16 scale * code +
    float16 least number.
    """
    draw = torch.Generator().manual_seed(seed)
    groups = -(-columns // 32)
    scales = (scale * (0.2 + torch.rand(rows, groups, 1, generator=draw))).half().float()
    if bits == 4:
        codes = torch.randint(0, 16, (rows, groups, 32), generator=draw)
        codes[:, :, 3], codes[:, :, 7] = 0, 15
        least = (scales * (torch.rand(rows, groups, 1, generator=draw) - 8)).half().float()
    else:
        codes = torch.randint(-127, 128, (rows, groups, 32), generator=draw)
        codes[:, :, 3] = 127
        least = torch.zeros(())
    return (scales * codes + least).flatten(1)[:, :columns].bfloat16().contiguous()


GRIDS = {4: "nibbles", 8: "bytes"}


def kept_as(name: str, expected: str) -> str:
    return expected if name != "avx2" else "bf16"


@pytest.mark.parametrize("bits", GRIDS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("scale", [1e-5, 0.01, 3.0])
def test_grids_are_found_and_nothing_is_lost(name: str, bits: int, scale: float) -> None:
    """To the last bit: products with rows of a single one are the weights."""
    w = on_grids(70, 160, bits, 11, scale)
    w[5] = 0
    w[6, :64] = w[6, 0]
    for first, count in ((0, 160), (3, 1), (7, 2), (20, 17), (64, 32), (32, 33)):
        one = torch.eye(160)[first : first + count].bfloat16()
        found, came = multiply(name, "bf16", w, one)
        assert torch.equal(found, w.float().T[first : first + count])
        assert came == kept_as(name, GRIDS[bits])


@pytest.mark.parametrize("bits", GRIDS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_with_grids(name: str, rows: int, columns: int, bits: int) -> None:
    w, a = on_grids(70, columns, bits, 12), numbers(rows, columns, 13)
    found, _ = multiply(name, "bf16", w, a)
    close(found, w, a)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kept", ["plain", "bf12", "nibbles", "bytes"])
def test_every_number_of_rows(name: str, kept: str) -> None:
    """There are many ways to multiply a few, each for some numbers of them."""
    bits = {"nibbles": 4, "bytes": 8}.get(kept)
    w = on_grids(70, 320, bits, 22) if bits else numbers(70, 320, 22, 0.05)
    a = numbers(42, 320, 23)
    for rows in range(1, 43):
        found, came = multiply(name, kept if bits is None else "bf16", w, a[:rows].contiguous())
        close(found, w, a[:rows])
    assert came == ("bf16" if kept == "plain" else kept_as(name, kept))


@pytest.mark.parametrize("bits", GRIDS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_a_few_numbers_off_their_grids(name: str, bits: int, rows: int) -> None:
    w, a = on_grids(300, 576, bits, 14), numbers(rows, 576, 15)
    w[2, 100] = 17.0
    w[40, 575] = 1e-30
    w[299, :32] = numbers(1, 32, 16)[0]
    found, came = multiply(name, "bf16", w, a)
    close(found, w, a)
    assert came == kept_as(name, GRIDS[bits])


@pytest.mark.parametrize("name", EACH)
def test_half_of_a_matrix_on_grids(name: str) -> None:
    """Too many numbers would have to be kept apart: it takes 12 bits."""
    w, a = on_grids(128, 576, 4, 17), numbers(3, 576, 18)
    w[64:] = numbers(64, 576, 19, 0.05)
    found, came = multiply(name, "bf16", w, a)
    close(found, w, a)
    assert came == kept_as(name, "bf12")


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("kept", "came"), [("bf12", "bf12"), ("plain", "bf16"), ("int8", "nibbles")])
def test_grids_where_something_is_asked_for(kept: str, came: str, name: str) -> None:
    """int8 takes what is exact and smaller."""
    w, a = on_grids(64, 96, 4, 20), numbers(3, 96, 21)
    found, found_in = multiply(name, kept, w, a)
    assert found_in == (came if name != "avx2" else "bytes" if kept == "int8" else "bf16")
    if found_in != "bytes":
        close(found, w, a)


@pytest.mark.parametrize("kept", WANTED)
@pytest.mark.parametrize(("rows", "columns"), [(1, 160), (40, 160), (400, 1536)])
def test_threads_change_nothing(kept: str, rows: int, columns: int) -> None:
    """Whoever takes a part of the work, and where there are more threads than parts."""
    w, a = numbers(200, columns, 7), numbers(rows, columns, 8)
    one, _ = multiply(SETS[0], kept, w, a, threads=1)
    assert all(torch.equal(one, multiply(SETS[0], kept, w, a, threads=n)[0]) for n in (2, 3, 7))


@pytest.mark.parametrize("kept", WANTED)
def test_infinities_stay(kept: str) -> None:
    w, a = numbers(40, 64, 9), numbers(3, 64, 10).abs()
    w[7, 3] = float("inf")
    found, _ = multiply(SETS[0], kept, w, a)
    assert bool(torch.isinf(found[:, 7]).all())
    assert bool(torch.isfinite(found[:, :7]).all())
