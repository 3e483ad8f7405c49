"""Products with codes: decoded in the product for few tokens, and once for many."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pegboard.plugins.linear_triton.experts import CodedExperts, stacked
from pegboard.plugins.linear_triton.options import TritonProductsOptions
from pegboard.plugins.linear_triton.slabs import KINDS, WIDEST, Slabs, constants_of, mergeable, slabs_of
from pegboard.plugins.quantization.api import LinearContext, Linears
from pegboard.toolkit.kernels import interpreter, objection
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.kernels.operations import TYPES, power_of_two
from pegboard.toolkit.model.experts import ExpertsMethod
from pegboard.toolkit.model.layouts import Code, Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Site

FEWEST, MOST = 16, 64
"""Tokens of a tile."""
ROWS = 64
"""Rows of a matrix in a tile: the least that Hopper's tensor cores take. Twice as many are faster for codes of 4 bits
and many tokens, which are then read half as often (docs/gpu-results.md).
"""
SHORTEST = 4
"""Rounds of a part, where the columns of a matrix are cut."""


class TritonProducts(Linears[TritonProductsOptions]):
    """Products in one launch, of which those with one matrix come one after the other, on one stream. The weights are
    (code - zero) * scale, which is not rounded for products of at most `most_tokens` tokens.
    """

    @classmethod
    def supports(cls, options: TritonProductsOptions, ctx: LinearContext) -> str | None:
        if ctx.dtype not in TYPES:
            return f"it computes in float16, bfloat16 and float32, not {ctx.dtype}"
        return objection(ctx.device)

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        name = ", ".join(part.name for part in site.parts)
        return _Coded([self._piece(name, run) for run in _runs(parts)])

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        """Where all experts are of the same layouts, and the kernels decode all of them, a product is one launch, or
        two of parts that are not. Else each expert has a product of its own.
        """
        name = ", ".join(part.name for part in site.parts)
        if any(layout.code not in KINDS for parts in experts for layout, _ in parts):
            return super().build_experts(site, experts)
        cut = [[slabs_of(name, run) for run in _runs(parts)] for parts in experts]
        if len({len(pieces) for pieces in cut}) > 1:
            return super().build_experts(site, experts)
        pieces = [stacked(some) for some in zip(*cut, strict=True)]
        alike = [piece for piece in pieces if piece is not None]
        return CodedExperts(alike, self.options) if len(alike) == len(pieces) else super().build_experts(site, experts)

    def _piece(self, name: str, run: Sequence[tuple[Layout, Codes]]) -> _Piece:
        if run[0][0].code is Code.PLAIN:
            return _Plain(torch.cat([codes.codes.to(self.ctx.dtype) for _, codes in run]))
        if run[0][0].code not in KINDS:
            return _Dequantised(run, self.ctx.dtype)
        return _Product(slabs_of(name, run), self.options)


def _runs(parts: Sequence[tuple[Layout, Codes]]) -> list[list[tuple[Layout, Codes]]]:
    """Return neighbours that can be one matrix together."""
    runs: list[list[tuple[Layout, Codes]]] = []
    for part in parts:
        if runs and mergeable(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


class _Piece(abc.ABC):
    """Some rows of a product."""

    rows: int
    nbytes: int

    @abc.abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [tokens, cols] times the transposed weights, plus `bias` [rows]: [tokens, rows]."""

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write the product to `out`, whose rows may have gaps between them."""
        out.copy_(self.product(x, bias))


class _Plain(_Piece):
    def __init__(self, weight: Tensor) -> None:
        self._weight, self.rows, self.nbytes = weight, weight.shape[0], weight.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)


class _Dequantised(_Piece):
    """Codes that the kernels do not decode, since 16 bits do not hold their numbers: dequantised in each product."""

    def __init__(self, run: Sequence[tuple[Layout, Codes]], dtype: torch.dtype) -> None:
        self._run, self._dtype = tuple(run), dtype
        self.rows = sum(codes.codes.shape[0] for _, codes in run)
        self.nbytes = sum(codes.nbytes for _, codes in run)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, torch.cat([exact(layout, codes, self._dtype) for layout, codes in self._run]), bias)


class _Product(_Piece):
    def __init__(self, slabs: Slabs, options: TritonProductsOptions) -> None:
        self._slabs, self._options = slabs, options
        self.rows, self.nbytes = slabs.rows, slabs.nbytes
        self._keeps = None if slabs.order is None else slabs.order >= 0
        tiles = -(-slabs.rows // (options.block_rows or ROWS)) * -(-options.most_tokens // FEWEST)
        self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=slabs.codes.device)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] > self._options.most_tokens:
            return self._by_torch(x, bias)
        out = torch.empty(x.shape[0], self.rows, dtype=x.dtype, device=x.device)
        self._by_codes(x, bias, out)
        return out

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if x.shape[0] > self._options.most_tokens:
            super().write(x, bias, out)
        else:
            self._by_codes(x, bias, out)

    def _by_torch(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from pegboard.plugins.linear_triton.kernels import dequantize_kernel

        slabs = self._slabs
        cols = slabs.cols if slabs.order is None else slabs.width
        weight = torch.empty(slabs.rows, cols, dtype=x.dtype, device=x.device)
        block = 32
        grid = -(-slabs.rows // block), slabs.codes.shape[0]
        tensors = slabs.codes, slabs.scales, _or(slabs.zeros, slabs.scales), weight
        shape = constants_of(slabs) | {"BLOCK_N": block, "num_warps": 4}
        launch(dequantize_kernel, grid, *tensors, cols, slabs.rows, cols, **shape)
        if slabs.order is not None and self._keeps is not None:
            x = torch.where(self._keeps, x.index_select(1, slabs.order.clamp(min=0)), 0)
        return F.linear(x, weight, bias)

    def _by_codes(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        from pegboard.plugins.linear_triton.kernels import product_kernel

        slabs, options = self._slabs, self._options
        tokens, count = x.shape[0], slabs.codes.shape[0]
        block = min(max(power_of_two(tokens), FEWEST), MOST)
        large = block == MOST and slabs.packed and slabs.span == WIDEST and slabs.zeros is None
        block_rows = options.block_rows or (2 * ROWS if large else ROWS)
        tiles = -(-slabs.rows // block_rows), -(-tokens // block)
        wanted = -(-(options.waves or (2 if large else 4)) * _multiprocessors(x.device) // (tiles[0] * tiles[1]))
        rounds = count // slabs.at_once
        each = -(-rounds // max(min(wanted, rounds // SHORTEST), 1)) * slabs.at_once
        parts = -(-count // each)
        shape = constants_of(slabs) | {
            "ORDERED": slabs.order is not None,
            "EVEN": slabs.width == slabs.cols,
            "BIAS": bias is not None,
            "SPLIT": parts > 1,
            "BLOCK_N": block_rows,
            "BLOCK_T": block,
            "AT_ONCE": slabs.at_once,
            "PTX": x.dtype != torch.float32 and not interpreter.interpreting(),
            "num_warps": options.warps,
            "num_stages": options.stages or (3 if slabs.zeros is None else 4),
        }
        partial = torch.empty(parts if parts > 1 else 0, tokens, slabs.rows, dtype=torch.float32, device=x.device)
        blocks = _or(slabs.zeros, slabs.scales), _or(slabs.order, slabs.scales), _or(bias, slabs.scales)
        tensors = x, slabs.codes, slabs.scales, *blocks, out, partial, self._arrivals
        stride = x.stride(0) if tokens > 1 else slabs.cols
        sizes = stride, out.stride(0), tokens, slabs.rows, slabs.cols, count, each
        launch(product_kernel, (*tiles, parts), *tensors, *sizes, **shape)


class _Coded(LinearMethod):
    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = pieces
        self._rows = sum(piece.rows for piece in pieces)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        if len(self._pieces) == 1 and x.shape[0]:
            return self._pieces[0].product(x, bias)
        out = torch.empty(x.shape[0], self._rows, dtype=x.dtype, device=x.device)
        if not x.shape[0]:
            return out
        start = 0
        for piece in self._pieces:
            rows = slice(start, start + piece.rows)
            piece.write(x, None if bias is None else bias[rows], out[:, rows])
            start += piece.rows
        return out

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)


def _or(one: Tensor | None, other: Tensor) -> Tensor:
    """Return what a kernel gets: a tensor that it does not read, where there is none."""
    return other if one is None else one


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many a device has. What is compiled without one is compiled for an H100."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 1
