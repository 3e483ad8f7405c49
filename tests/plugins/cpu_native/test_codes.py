"""Products with the codes of quantised checkpoints: the numbers are `exact` ones in bf16, bit by bit."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pegboard.plugins.cpu_native.codes import NativeCodes, native_codes
from pegboard.plugins.cpu_native.library import FORMATS, Weights, load
from pegboard.plugins.cpu_native.model import WANTED
from pegboard.toolkit.model.layouts import Code, Codes, Layout, exact, pack
from tests.plugins.cpu_native.instruction_sets import EACH, SETS
from tests.plugins.cpu_native.test_products import SHAPES, close, numbers

INT8 = Layout(Code.INT8, (1, 32))
INT4 = Layout(Code.INT4, (1, 32))
ZEROS = Layout(Code.UINT4, (1, 64), zeros=True)


def codes_of(layout: Layout, rows: int, cols: int, seed: int, scales: torch.dtype = torch.float16) -> Codes:
    """Codes of all values, scales of both signs over several binades, zero points of all values."""
    draw = torch.Generator().manual_seed(seed)
    grid = layout.grid(rows, cols)
    if layout.code is Code.INT8:
        drawn = torch.randint(-128, 128, (rows, cols), generator=draw, dtype=torch.int8)
    else:
        drawn = pack(torch.randint(0, 16, (rows, cols), generator=draw, dtype=torch.uint8))
    sizes = torch.exp2(torch.rand(grid, generator=draw) * 6 - 9) * torch.randint(0, 2, grid, generator=draw).mul(2).sub(
        1
    )
    zeros = torch.randint(0, 16, grid, generator=draw, dtype=torch.uint8) if layout.zeros else None
    return Codes(drawn, sizes.to(scales), zeros)


def kept(layout: Layout, codes: Codes) -> NativeCodes:
    found = native_codes(layout, codes)
    assert found is not None
    return found


def multiply(name: str, w: NativeCodes, cols: int, a: torch.Tensor, threads: int = 2) -> torch.Tensor:
    """Return a * w^T, and check that the codes stayed codes."""
    rows = w.codes.shape[0]
    out = torch.full((a.shape[0], rows), float("nan"))
    part = Weights(w.codes.data_ptr(), w.words.data_ptr(), w.group, FORMATS.index(w.format))
    arguments = (threads, WANTED["bf16"], ctypes.byref(part), rows, cols, a.data_ptr(), a.shape[0], out.data_ptr())
    assert FORMATS[load(name).pb_multiply(*arguments)] == w.format
    return out


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [INT8, INT4, ZEROS, Layout(Code.UINT4, (1, 0), zeros=True)], ids=str)
def test_numbers_are_exact(name: str, layout: Layout, scales: torch.dtype) -> None:
    """To the last bit: products with rows of a single one are the weights."""
    codes = codes_of(layout, 70, 160, 1, scales)
    w = exact(layout, codes, torch.bfloat16).float()
    for first, count in ((0, 160), (3, 1), (7, 2), (9, 3), (30, 4), (20, 17), (64, 32), (32, 33)):
        one = torch.eye(160)[first : first + count].bfloat16()
        assert torch.equal(multiply(name, kept(layout, codes), 160, one), w.T[first : first + count])


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products(name: str, rows: int, columns: int) -> None:
    layout = ZEROS if columns > 100 else INT4
    codes, a = codes_of(layout, 70, columns, 2), numbers(rows, columns, 3)
    close(multiply(name, kept(layout, codes), columns, a), exact(layout, codes, torch.bfloat16), a)


@pytest.mark.parametrize("name", EACH)
def test_every_number_of_rows(name: str) -> None:
    a = numbers(42, 320, 5)
    for layout in (INT4, ZEROS, Layout(Code.UINT4, (1, 160), zeros=True)):
        codes = codes_of(layout, 70, 320, 4)
        w, found = exact(layout, codes, torch.bfloat16), kept(layout, codes)
        for rows in range(1, 43):
            close(multiply(name, found, 320, a[:rows].contiguous()), w, a[:rows])


@pytest.mark.parametrize(("rows", "columns"), [(1, 160), (40, 160), (400, 1536)])
def test_threads_change_nothing(rows: int, columns: int) -> None:
    codes, a = codes_of(INT4, 200, columns, 6), numbers(rows, columns, 7)
    one = multiply(SETS[0], kept(INT4, codes), columns, a, 1)
    assert all(torch.equal(one, multiply(SETS[0], kept(INT4, codes), columns, a, n)) for n in (2, 3, 7))


def test_what_the_library_has_no_format_for() -> None:
    """Then the numbers are kept."""
    fine = codes_of(ZEROS, 8, 128, 8)
    assert fine.scales is not None
    assert native_codes(ZEROS, fine) is not None
    eight = codes_of(INT8, 8, 128, 10, torch.float32)
    assert native_codes(INT8, eight) is None, "float32 scales are no float16 numbers"
    odd = [fine.scales.float() * 1.0001, fine.scales.float() * 2.0**-130, fine.scales.float() * 2.0**110]
    assert all(native_codes(ZEROS, Codes(fine.codes, scales, fine.zeros)) is None for scales in odd)
    ordered = Layout(Code.UINT4, (1, 64), zeros=True, ordered=True)
    assert native_codes(ordered, Codes(fine.codes, fine.scales, fine.zeros, torch.zeros(128).int())) is None
    for layout in (Layout(Code.INT4, (1, 16)), Layout(Code.INT4, (8, 128)), Layout(Code.E2M1, (1, 32))):
        assert native_codes(layout, codes_of(layout, 8, 128, 9)) is None
