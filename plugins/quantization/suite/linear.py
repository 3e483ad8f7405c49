"""The conformance suite of Linears: products with codes, compared with float64 products of their exact numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from pegboard.conformance.rig.no_looks import NoLooks
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.options import Options
from pegboard.plugins.quantization.api import LinearContext, Linears
from pegboard.toolkit.kernels.experts import Groups, grouped
from pegboard.toolkit.model.layouts import PLAIN, Code, Codes, Layout, exact, pack
from pegboard.toolkit.model.linear import LinearMethod, Part, Site

LAYOUTS = (
    PLAIN,
    Layout(Code.E4M3, (1, 0)),
    Layout(Code.E4M3, (80, 0)),
    Layout(Code.E4M3, (128, 128)),
    Layout(Code.E5M2, (32, 64)),
    Layout(Code.INT8, (1, 0)),
    Layout(Code.INT8, (1, 32), zeros=True),
    Layout(Code.UINT8, (1, 0), zeros=True),
    Layout(Code.INT4, (1, 32)),
    Layout(Code.UINT4, (1, 64), zeros=True),
    Layout(Code.UINT4, (1, 32), zeros=True, ordered=True),
    Layout(Code.E2M1, (1, 32)),
    Layout(Code.E2M1, (1, 16)),
    Layout(Code.NF4, (1, 64)),
    Layout(Code.FP4, (1, 32)),
)
"""One of each kind. 128 divides none of the sizes below."""

COLS = 192
EXPERTS = 5
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding."""

_LARGEST = {Code.E4M3: 448.0, Code.E5M2: 4096.0, Code.E2M1: 6.0, Code.NF4: 1.0, Code.FP4: 1.0}
"""Of codes that are no integers."""

Parts = Sequence[tuple[Layout, Codes]]


def drawn(layout: Layout, rows: int, seed: int) -> Codes:
    """Return random codes [rows, COLS] of a layout, whose numbers are about 1 in size."""
    draw = torch.Generator().manual_seed(seed)
    if layout.code is Code.PLAIN:
        return Codes(torch.randn(rows, COLS, generator=draw).bfloat16())
    largest = _LARGEST.get(layout.code, 2.0 ** (layout.code.bits - 1))
    if layout.code in (Code.E4M3, Code.E5M2):
        kind = torch.float8_e4m3fn if layout.code is Code.E4M3 else torch.float8_e5m2
        codes = (torch.randn(rows, COLS, generator=draw).clamp(-4, 4) * largest / 4).to(kind)
    else:
        numbers = torch.randint(0, 2**layout.code.bits, (rows, COLS), generator=draw).to(torch.uint8)
        codes = numbers.view(torch.int8) if layout.code is Code.INT8 else numbers
        codes = pack(numbers) if layout.code.packed else codes
    grid = layout.grid(rows, COLS)
    scales = (0.5 + torch.rand(grid, generator=draw)) / largest
    half = 0 if layout.code is Code.INT8 else 2 ** (layout.code.bits - 1)
    zeros = (torch.randint(-3, 4, grid, generator=draw) + half).to(torch.uint8 if half else torch.int8)
    groups = torch.randint(0, grid[1], (COLS,), generator=draw).int()
    return Codes(codes, scales, zeros if layout.zeros else None, groups if layout.ordered else None)


def sites() -> Iterator[tuple[Site, Parts]]:
    """Yield a site of each layout, and some whose parts differ: in everything, or in their code alone."""
    for number, layout in enumerate(LAYOUTS):
        yield _site(number, [(layout, drawn(layout, 80, number))])
    apart = [*itertools.pairwise((LAYOUTS[3], LAYOUTS[0], LAYOUTS[9])), (Layout(Code.INT4, (1, 32)), LAYOUTS[11])]
    for first, second in apart:
        yield _site(90, [(first, drawn(first, 80, 7)), (second, drawn(second, 48, 8)), (first, drawn(first, 16, 9))])


def _site(number: int, parts: Parts) -> tuple[Site, Parts]:
    named = tuple(Part(f"layer.{index}", codes.codes.shape[0]) for index, (_, codes) in enumerate(parts))
    return Site(number, named, COLS), parts


class LinearContract(ContractSuite):
    """What every provider of products must do on a CPU, or on the device of `ctx`."""

    contract = "linear"

    @pytest.fixture(params=(torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
    def ctx(self, request: pytest.FixtureRequest) -> LinearContext:
        return LinearContext(torch.device("cpu"), request.param)

    @pytest.fixture
    def linears(self, ctx: LinearContext) -> Linears[Options]:
        made: Linears[Options] = self.build(ctx)
        return made

    def test_products_are_those_of_the_exact_weights(self, linears: Linears[Options], ctx: LinearContext) -> None:
        """With x and the exact weights as they were rounded, or before, a sum of n products in float32 has a standard
        error of at most 0.41 u |x| |w|, whatever n: 10 u allows for rows whose partial sums are all large, and is 800
        times below what TF32 would be off by. Each rounding of the result, of the product and with the bias, adds
        u |y|.
        """
        for site, parts in sites():
            weight = _weights(parts, ctx.dtype)
            method = _built(linears, site, parts)
            for tokens, bias in itertools.product((1, 3, 40), (None, _random(ctx, site.rows).cpu())):
                x = _random(ctx, tokens, COLS)
                found = method.apply(x, None if bias is None else bias.to(ctx.device))
                assert found.shape == (tokens, site.rows)
                assert found.dtype == ctx.dtype
                _assert_product(found, x, weight, bias, f"{parts[0][0]}, {tokens} tokens")

    def test_no_tokens(self, linears: Linears[Options], ctx: LinearContext) -> None:
        for site, parts in sites():
            found = _built(linears, site, parts).apply(torch.empty(0, COLS, dtype=ctx.dtype, device=ctx.device))
            assert found.shape == (0, site.rows)

    def test_rows_with_gaps(self, linears: Linears[Options], ctx: LinearContext) -> None:
        wide = _random(ctx, 6, 2 * COLS)
        for site, parts in sites():
            weight = _weights(parts, ctx.dtype)
            _assert_product(_built(linears, site, parts).apply(wide[:, COLS:]), wide[:, COLS:], weight, None, "gaps")

    def test_changes_nothing(self, linears: Linears[Options], ctx: LinearContext) -> None:
        x, bias = _random(ctx, 4, COLS), _random(ctx, 1000)
        before, bias_before = x.clone(), bias.clone()
        for site, parts in sites():
            method = _built(linears, site, parts)
            first, second = (method.apply(x, bias[: site.rows]) for _ in range(2))
            assert torch.equal(first, second), "the same product twice"
        assert torch.equal(x, before)
        assert torch.equal(bias, bias_before)

    def test_never_looks_at_data(self, linears: Linears[Options], ctx: LinearContext) -> None:
        """So that decode steps can be graphs, once it has computed."""
        x = _random(ctx, 4, COLS)
        for site, parts in sites():
            method = _built(linears, site, parts)
            method.apply(x)
            with NoLooks(ctx.device):
                method.apply(x)

    def test_tells_its_memory(self, linears: Linears[Options], ctx: LinearContext) -> None:
        for site, parts in sites():
            method: LinearMethod = _built(linears, site, parts)
            assert 0 < method.nbytes <= 8 * site.rows * site.cols

    def test_experts_have_weights_of_their_own(self, linears: Linears[Options], ctx: LinearContext) -> None:
        """Of tokens that are spread unevenly, and of rows that are in the order of experts already."""
        for layout in LAYOUTS:
            site, experts = _experts(layout)
            method = linears.build_experts(site, [_moved_all(parts, ctx.device) for parts in experts])
            weights = [_weights(parts, ctx.dtype) for parts in experts]
            for tokens, gather in ((1, True), (9, True), (80, True), (80, False)):
                chosen = (torch.arange(tokens)[:, None] * 3 + torch.arange(2)) % 7 % (EXPERTS - 1)
                groups = grouped(chosen.int().to(ctx.device), EXPERTS)
                x = _random(ctx, tokens if gather else 2 * tokens, COLS)
                found = method.apply(x, groups, gather=gather)
                assert found.shape == (2 * tokens, site.rows)
                assert found.dtype == ctx.dtype
                _assert_experts(found, x[groups.rows] if gather else x, weights, groups, f"{layout}, {tokens} tokens")

    def test_experts_and_no_tokens(self, linears: Linears[Options], ctx: LinearContext) -> None:
        site, experts = _experts(LAYOUTS[1])
        method = linears.build_experts(site, [_moved_all(parts, ctx.device) for parts in experts])
        groups = grouped(torch.empty(0, 2, dtype=torch.int32, device=ctx.device), EXPERTS)
        x = torch.empty(0, COLS, dtype=ctx.dtype, device=ctx.device)
        assert method.apply(x, groups, gather=True).shape == (0, site.rows)

    def test_experts_of_several_layouts(self, linears: Linears[Options], ctx: LinearContext) -> None:
        """One of them is plain."""
        site, _ = _experts(PLAIN)
        some = [[(layout, drawn(layout, 40, n))] for n, layout in enumerate((PLAIN, *LAYOUTS[1:EXPERTS]))]
        method = linears.build_experts(site, [_moved_all(parts, ctx.device) for parts in some])
        groups = grouped(torch.arange(EXPERTS, dtype=torch.int32, device=ctx.device)[:, None], EXPERTS)
        x = _random(ctx, EXPERTS, COLS)
        found = method.apply(x, groups, gather=True)
        for expert, parts in enumerate(some):
            one = slice(expert, expert + 1)
            _assert_product(found[one], x[one], _weights(parts, ctx.dtype), None, f"expert {expert}")

    def test_experts_never_look_at_data(self, linears: Linears[Options], ctx: LinearContext) -> None:
        """Or say that the host has to wait."""
        groups = grouped(torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=ctx.device), EXPERTS)
        x = _random(ctx, 2, COLS)
        for layout in (LAYOUTS[1], LAYOUTS[8]):
            site, experts = _experts(layout)
            method = linears.build_experts(site, [_moved_all(parts, ctx.device) for parts in experts])
            assert 0 < method.nbytes <= 8 * EXPERTS * site.rows * site.cols
            reason = method.why_it_waits()
            method.apply(x, groups, gather=True)
            if reason is not None:
                assert reason.strip(), "a reason says something"
                continue
            with NoLooks(ctx.device):
                method.apply(x, groups, gather=True)


def _experts(layout: Layout) -> tuple[Site, list[Parts]]:
    """Return a site with experts of two parts each, of which the last gets no token."""
    experts = [[(layout, drawn(layout, rows, 10 * expert + rows)) for rows in (24, 16)] for expert in range(EXPERTS)]
    if layout.ordered:  # parts of one expert have the columns in one order
        for (_, first), (_, second) in experts:
            second.groups = first.groups
    return Site(0, (Part("experts.*.gate", 24), Part("experts.*.up", 16)), COLS, EXPERTS), [*experts]


def _assert_experts(found: Tensor, x: Tensor, weights: Sequence[Sequence[Tensor]], groups: Groups, what: str) -> None:
    """Compare each position with the product of its row of x and its expert's weights."""
    begin = 0
    for expert, end in enumerate(groups.offsets.tolist()):
        rows = slice(begin, end)
        _assert_product(found[rows], x[rows], weights[expert], None, f"{what}, expert {expert}")
        begin = end


def _moved_all(parts: Parts, device: torch.device) -> Parts:
    return [(layout, _moved(codes, device)) for layout, codes in parts]


def _built(linears: Linears[Options], site: Site, parts: Parts) -> LinearMethod:
    """Return the product of a site on the device of the context."""
    return linears.build(site, [(layout, _moved(codes, linears.ctx.device)) for layout, codes in parts])


def _moved(codes: Codes, device: torch.device) -> Codes:
    tensors = codes.codes, codes.scales, codes.zeros, codes.groups
    first, *others = (None if one is None else one.to(device) for one in tensors)
    assert first is not None
    return Codes(first, *others)


def _random(ctx: LinearContext, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(ctx.dtype).to(ctx.device)


def _weights(parts: Parts, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the exact weights as they are rounded to a type, and as they are before that, in float64."""
    return [
        torch.cat([exact(layout, codes, one).double() for layout, codes in parts]) for one in (dtype, torch.float32)
    ]


def _assert_product(found: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, what: str) -> None:
    """Compare with the products of both weights. A provider may have rounded them or not."""
    wide = x.double().cpu()
    worst = []
    for weight in weights:
        product = wide @ weight.T
        expected = product if bias is None else product + bias.double().cpu()
        sizes = wide.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
        bound = 10 * 2.0**-24 * sizes + UNIT[found.dtype] * (product.abs() + expected.abs())
        error = (found.double().cpu() - expected).abs()
        worst.append(float((error / bound).max()) if error.numel() else 0.0)
    assert min(worst) <= 1, f"{what}: off by {min(worst):.3g} times the bound"
