"""What the suite does not see of the products in Triton: how matrices are cut, and which are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.linear_triton import products
from pegboard.plugins.linear_triton.experts import CodedExperts, stacked
from pegboard.plugins.linear_triton.options import TritonProductsOptions
from pegboard.plugins.linear_triton.products import TritonProducts
from pegboard.plugins.linear_triton.slabs import Slabs, slabs_of
from pegboard.plugins.quantization.api import LinearContext
from pegboard.toolkit.kernels.experts import grouped
from pegboard.toolkit.kernels.launch import Launch, observed
from pegboard.toolkit.model.layouts import Code, Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Part, Site

ROWS, COLS = 40, 1024
CPU = LinearContext(torch.device("cpu"), torch.float32)


def drawn(layout: Layout, rows: int = ROWS, cols: int = COLS, seed: int = 0) -> Codes:
    """Random codes of 4 bits, in groups."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=draw)
    scales = torch.rand(layout.grid(rows, cols), generator=draw) + 0.5
    groups = torch.randint(0, scales.shape[1], (cols,), generator=draw).int() if layout.ordered else None
    zeros = torch.randint(4, 12, scales.shape, generator=draw).to(torch.uint8) if layout.zeros else None
    return Codes(codes, scales, zeros, groups)


def product(parts: list[tuple[Layout, Codes]], **options: Any) -> LinearMethod:
    named = tuple(Part(f"layer.{index}", codes.codes.shape[0]) for index, (_, codes) in enumerate(parts))
    cols = parts[0][1].codes.shape[1] * 2
    return TritonProducts(TritonProductsOptions(**options), CPU).build(Site(0, named, cols), parts)


def watched(method: LinearMethod, x: Tensor, bias: Tensor | None, see: Callable[[Launch], object]) -> Tensor:
    """Return a product, and show the launches that made it."""

    def note(launch: Launch) -> bool:
        see(launch)
        return True

    with observed(note):
        return method.apply(x, bias)


def launches(method: LinearMethod, x: Tensor) -> tuple[Tensor, list[str]]:
    """Return a product, and the names of the kernels that made it."""
    seen: list[str] = []
    found = watched(method, x, None, lambda launch: seen.append(launch.kernel.__name__))  # type: ignore[attr-defined]
    return found, seen


def _grid(seen: list[tuple[int, ...]], launch: Launch) -> None:
    seen.append(launch.grid)


def test_columns_are_cut_where_rows_are_few() -> None:
    layout = Layout(Code.UINT4, (1, 64), zeros=True)
    codes, x, bias = drawn(layout), torch.randn(3, COLS), torch.randn(ROWS)
    expected = x.double() @ exact(layout, codes, torch.float64).T + bias
    for waves, parts in ((1, 1), (64, 2)):
        method = product([(layout, codes)], waves=waves)
        for _ in range(2):  # the second finds what the first has left behind
            seen: list[tuple[int, ...]] = []
            found = watched(method, x, bias, functools.partial(_grid, seen))
            assert seen == [(1, 1, parts)]
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_many_tokens_are_a_product_of_torch() -> None:
    layout = Layout(Code.E2M1, (1, 32))
    x = torch.randn(5, COLS)
    method = product([(layout, drawn(layout))], most_tokens=4, waves=1)
    assert launches(method, x)[1] == ["dequantize_kernel"]
    assert launches(method, x[:4])[1] == ["product_kernel"]


def test_parts_of_one_layout_are_one_product() -> None:
    """Also if their blocks are of different heights, and unless their columns are ordered differently."""
    layout, wide = Layout(Code.INT4, (1, 128)), Layout(Code.INT4, (24, 128))
    x = torch.randn(2, COLS)
    parts = [(layout, drawn(layout)), (wide, drawn(wide, 56, seed=1)), (layout, drawn(layout, 16, seed=2))]
    found, seen = launches(product(parts, waves=1), x)
    assert seen == ["product_kernel"]
    expected = x.double() @ torch.cat([exact(one, codes, torch.float64) for one, codes in parts]).T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    ordered = Layout(Code.INT4, (1, 128), ordered=True)
    same = [(ordered, drawn(ordered, seed=3)), (ordered, drawn(ordered, seed=3))]
    other = [*same, (ordered, drawn(ordered, seed=4))]
    assert [len(launches(product(one, waves=1), x)[1]) for one in (same, other)] == [1, 2]


def test_groups_that_no_power_of_two_divides_are_padded() -> None:
    layout = Layout(Code.UINT4, (1, 24), zeros=True)
    codes, x = drawn(layout, cols=120), torch.randn(3, 120)
    expected = x.double() @ exact(layout, codes, torch.float64).T
    for most in (0, 8):
        found = product([(layout, codes)], most_tokens=most).apply(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


BEYOND = 3
"""Rows of NaN after scales."""


def guarded(slabs: Slabs | None) -> Slabs | None:
    """Return the same with NaN stored after the scales: what reads beyond them does not stay finite."""
    if slabs is None:
        return None
    flat = slabs.scales.flatten()
    after = flat.new_full((BEYOND * slabs.scales.shape[-1],), float("nan"))
    return replace(slabs, scales=torch.cat([flat, after])[: len(flat)].view(slabs.scales.shape))


@pytest.mark.parametrize(("group", "cols"), [(192, 192), (96, 192), (96, 96), (576, 576), (320, 640), (320, 300)])
def test_padding_has_scales(group: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are odd multiples of a span end within a slab: the rest of its columns has no weights, and is
    multiplied all the same.
    """
    monkeypatch.setattr(products, "slabs_of", lambda name, parts: guarded(slabs_of(name, parts)))
    monkeypatch.setattr(products, "stacked", lambda slabs: guarded(stacked(slabs)))
    layout = Layout(Code.UINT4, (1, group), zeros=True)
    codes, x = drawn(layout, cols=cols), torch.randn(3, cols)
    expected = x.double() @ exact(layout, codes, torch.float64).T
    for most in (0, 8):
        found = product([(layout, codes)], most_tokens=most).apply(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    site = Site(0, (Part("experts.*.up", ROWS),), cols, experts=2)
    other = drawn(layout, cols=cols, seed=1)
    experts = TritonProducts(TritonProductsOptions(), CPU).build_experts(site, [[(layout, other)], [(layout, codes)]])
    assert isinstance(experts, CodedExperts)
    groups = grouped(torch.tensor([[1], [1], [1]], dtype=torch.int32), 2)
    found = experts.apply(x, groups, gather=True)
    torch.testing.assert_close(found.double(), expected[groups.rows], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("code", [Code.UINT4, Code.E4M3, Code.INT8])
@pytest.mark.parametrize("group", [0, 16, 24, 32, 48, 64, 96, 128, 192, 320, 576])
def test_each_span_has_scales(code: Code, group: int) -> None:
    """Whatever the columns. The kernels take the block span * SPAN // GROUP."""
    for cols in (48, 96, 192, 200, 576, 640):
        layout = Layout(code, (1, group), zeros=code is Code.UINT4)
        scales = torch.ones(layout.grid(2, cols))
        zeros = torch.zeros(scales.shape, dtype=torch.uint8) if layout.zeros else None
        numbers = torch.zeros(2, cols // 2 if code.packed else cols, dtype=torch.uint8)
        slabs = slabs_of("layer.0", [(layout, Codes(numbers, scales, zeros))])
        last = (slabs.width - slabs.span) // slabs.group if slabs.group else 0
        assert last < slabs.scales.shape[0], (group, cols)
        assert slabs.zeros is None or slabs.zeros.shape == slabs.scales.shape


@pytest.mark.parametrize(
    ("code", "kind", "bad"), [(Code.E4M3, torch.float8_e4m3fn, 0x7F), (Code.E5M2, torch.float8_e5m2, 0xFC)]
)
def test_weights_that_are_no_numbers_are_refused(code: Code, kind: torch.dtype, bad: int) -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[3, 5] = bad
    with pytest.raises(ModelError, match=r"layer\.0 has weights that are infinite, or no numbers"):
        slabs_of("layer.0", [(Layout(code), Codes(codes.view(kind), torch.ones(16, 1)))])
