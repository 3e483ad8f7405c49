"""Products of experts with codes: pairs of tokens and experts in tiles of one expert, decoded in the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pegboard.plugins.linear_triton.options import TritonProductsOptions
from pegboard.plugins.linear_triton.slabs import Slabs, constants_of
from pegboard.toolkit.kernels import interpreter
from pegboard.toolkit.kernels.experts import Groups, tiles_of
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.model.experts import ExpertsMethod

ROWS = 64
"""Rows of a matrix in a tile: twice as many spill registers where a tile has 64 positions."""


def stacked(experts: Sequence[Slabs]) -> Slabs | None:
    """Return the matrices of all experts, whose tensors lie one after the other; None where they are not alike."""
    first = experts[0]
    if any(_form(one) != _form(first) for one in experts):
        return None

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(one, name) for one in experts]
        return None if tensors[0] is None else torch.stack(tensors)

    codes, scales = joined("codes"), joined("scales")
    assert codes is not None
    assert scales is not None
    return replace(first, codes=codes, scales=scales, zeros=joined("zeros"), order=joined("order"))


def _form(slabs: Slabs) -> tuple[object, ...]:
    tensors = slabs.codes, slabs.scales, slabs.zeros, slabs.order
    shapes = [None if one is None else (one.shape, one.dtype) for one in tensors]
    return slabs.layout, slabs.rows, slabs.cols, slabs.span, slabs.group, slabs.high, *shapes


class CodedExperts(ExpertsMethod):
    """Matrices of all experts, `pieces` of their rows one below the other."""

    def __init__(self, pieces: Sequence[Slabs], options: TritonProductsOptions) -> None:
        self._pieces, self._options = pieces, options
        self._rows = sum(piece.rows for piece in pieces)

    def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = torch.empty(groups.pairs, self._rows, dtype=x.dtype, device=x.device)
        start = 0
        for piece in self._pieces:
            if groups.pairs:
                self._write(piece, x, groups, out[:, start : start + piece.rows], gather)
            start += piece.rows
        return out

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def _write(self, slabs: Slabs, x: Tensor, groups: Groups, out: Tensor, gather: bool) -> None:
        from pegboard.plugins.linear_triton.kernels import expert_product_kernel

        tiles = tiles_of(groups) if groups.tiles is None else groups.tiles
        options, count, tokens = self._options, slabs.codes.shape[1], x.shape[0]
        block_rows = options.block_rows or ROWS
        zeros = slabs.scales if slabs.zeros is None else slabs.zeros
        order = slabs.scales if slabs.order is None else slabs.order
        shape = constants_of(slabs) | {
            "ORDERED": slabs.order is not None,
            "EVEN": count * slabs.span * (2 if slabs.packed else 1) == slabs.cols,
            "GATHER": gather,
            "BLOCK_N": block_rows,
            "TILE": groups.tile,
            "AT_ONCE": slabs.at_once,
            "PTX": x.dtype != torch.float32 and not interpreter.interpreting(),
            "num_warps": options.warps,
            "num_stages": options.stages or (3 if slabs.zeros is None else 4),
        }
        tensors = x, slabs.codes, slabs.scales, zeros, order, groups.rows, tiles, out
        stride = x.stride(0) if tokens > 1 else slabs.cols
        sizes = stride, out.stride(0), tokens, groups.pairs, slabs.rows, slabs.cols, count
        each = slabs.scales[0].numel(), 0 if slabs.order is None else slabs.order.shape[1]
        grid = -(-slabs.rows // block_rows), tiles.shape[0]
        launch(expert_product_kernel, grid, *tensors, *sizes, *each, **shape)
