"""The Triton functions. Importing this module imports triton.

A matrix [rows, cols] lies in *slabs*: SPAN columns of all rows, row after row, a byte each; of codes of 4 bits 2 * SPAN
columns, the first half of them in the low bits. So a program reads one run of bytes per slab. All columns of a span
have one scale per row. Products with a span are made with the bare codes, which every type holds exactly, added up in
float32, and multiplied by the scale then: weights are not rounded at all.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegboard.plugins.linear_triton.decoding import halves, numbers, whole
from pegboard.toolkit.kernels.expert_functions import positions_of


@triton.jit
def _inputs(
    x, order, span, token, tokens, x_row, cols, SPAN: tl.constexpr, EVEN: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """x [tokens, SPAN] of a span's columns; 0 for those that are none."""
    at = span * SPAN + tl.arange(0, SPAN)
    mask = (token < tokens)[:, None]
    if ORDERED:
        at = tl.load(order + at)
        mask = mask & (at >= 0)[None, :]
    elif not EVEN:
        mask = mask & (at < cols)[None, :]
    return tl.load(x + token[:, None] * x_row + at[None, :], mask=mask, other=0.0)


@triton.jit
def _block(place, span, row, rows, SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr):
    """Return what is kept per block, [grid across, grid down], for each row of a tile and a span: [rows]."""
    DOWN = (rows + HIGH - 1) // HIGH
    across = span * SPAN // GROUP if GROUP > 0 else 0
    return tl.load(place + across * DOWN + row // HIGH, mask=row < rows, other=0)


@triton.jit
def _less(
    weights, zeros, span, row, rows, ZEROS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr
):
    """Numbers less their zeros, exactly."""
    if ZEROS:
        zero = _block(zeros, span, row, rows, SPAN, GROUP, HIGH)
        weights = weights - zero.to(tl.float32).to(weights.dtype)[:, None]
    return weights


@triton.jit
def _times(weights, inputs, total):
    return tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")


@triton.jit
def _finish(total, bias, out, out_row, row, token, rows, tokens, BIAS: tl.constexpr):
    """Round sums [rows, tokens], add the bias, and store them."""
    dtype: tl.constexpr = out.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    if BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    tl.store(out + token[None, :].to(tl.int64) * out_row + row[:, None], total.to(dtype), mask=mask)


@triton.jit
def _plus_slab(
    total, tile, slab, x, scales, zeros, order, row, token, x_row, tokens, rows, cols,
    CODE: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`total` float32 [rows, tokens], and the products with a slab: times its scales, but for whole rows of bytes."""
    dtype: tl.constexpr = x.dtype.element_ty
    none = tl.zeros(total.shape, tl.float32)
    if PACKED:
        span = 2 * slab
        first, second = halves(tile, dtype, CODE, OFFSET, PTX)
        first = _less(first, zeros, span, row, rows, ZEROS, SPAN, GROUP, HIGH)
        second = _less(second, zeros, span + 1, row, rows, ZEROS, SPAN, GROUP, HIGH)
        left = _inputs(x, order, span, token, tokens, x_row, cols, SPAN, EVEN, ORDERED)
        right = _inputs(x, order, span + 1, token, tokens, x_row, cols, SPAN, EVEN, ORDERED)
        sums = _times(first, left, none)
        if GROUP > 0 and GROUP % (2 * SPAN) != 0:
            total += sums * _block(scales, span, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
            sums = none
        sums = _times(second, right, sums)
        return total + sums * _block(scales, span + 1, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
    else:
        weights = _less(whole(tile, dtype, CODE, OFFSET, PTX), zeros, slab, row, rows, ZEROS, SPAN, GROUP, HIGH)
        inputs = _inputs(x, order, slab, token, tokens, x_row, cols, SPAN, EVEN, ORDERED)
        if GROUP > 0:
            sums = _times(weights, inputs, none)
            return total + sums * _block(scales, slab, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
        else:
            return _times(weights, inputs, total)


@triton.jit
def product_kernel(
    x, codes, scales, zeros, order, bias, out, partial, arrivals, x_row, out_row, tokens, rows, cols, slabs, each,
    CODE: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, AT_ONCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of tokens, parts of the columns, of `each` slabs). A round takes AT_ONCE slabs.
    `out` is [tokens, rows].

    With SPLIT each part writes its sums to `partial` float32 [parts, tokens, rows], and the one that comes last, by
    `arrivals` int32 [blocks of rows * blocks of tokens], adds them up in the order of parts: so the result does not
    depend on who that is. `arrivals` are 0 before and after.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    place = codes + (tl.minimum(row, rows - 1) * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    slab_bytes = tl.full((), SPAN, tl.int64) * rows
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, slabs), AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            tile = tl.load(place + (start + more) * slab_bytes)
            total = _plus_slab(
                total, tile, start + more, x, scales, zeros, order, row, token, x_row, tokens, rows, cols,
                CODE, OFFSET, PACKED, ZEROS, ORDERED, SPAN, GROUP, HIGH, EVEN, PTX,
            )  # fmt: skip
    if GROUP == 0 and not PACKED:
        total *= _block(scales, 0, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
    if SPLIT:
        _meet(total, partial, arrivals, bias, out, out_row, row, token, rows, tokens, BIAS)
    else:
        _finish(total, bias, out, out_row, row, token, rows, tokens, BIAS)


@triton.jit
def _meet(total, partial, arrivals, bias, out, out_row, row, token, rows, tokens, BIAS: tl.constexpr):
    """Write the sums of a part, and finish those of all if it is the last one."""
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    place = partial + token[None, :] * rows + row[:, None]
    size = tl.full((), 1, tl.int64) * tokens * rows
    tl.store(place + tl.program_id(2) * size, total, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them tells it
    arrived = arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(2) - 1:
        total = tl.zeros(total.shape, tl.float32)
        for one in range(tl.num_programs(2)):
            total += tl.load(place + one * size, mask=mask, other=0.0, cache_modifier=".cg")
        _finish(total, bias, out, out_row, row, token, rows, tokens, BIAS)
        tl.store(arrived, 0)


@triton.jit
def expert_product_kernel(
    x, codes, scales, zeros, order, sources, tiles, out, x_row, out_row, tokens, pairs, rows, cols, slabs,
    scales_each, order_each,
    CODE: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, tiles of `Groups`). All experts' slabs, scales, zeros and orders lie one after the other,
    `scales_each` and `order_each` of an expert. With GATHER position p has row sources[p] of x [tokens, cols], and else
    row p. `out` is [pairs, rows].
    """
    expert, position, end = positions_of(tiles, TILE)
    if expert < 0:
        return
    inside = position < end
    token = tl.load(sources + position, mask=inside, other=0) if GATHER else position
    token = tl.where(inside, token, tokens).to(tl.int64)  # what is not inside has no inputs
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slab_bytes = tl.full((), SPAN, tl.int64) * rows
    number = expert.to(tl.int64)
    scales += number * scales_each
    zeros += number * scales_each
    order += number * order_each
    place = codes + number * slabs * slab_bytes
    place = place + (tl.minimum(row, rows - 1) * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    total = tl.zeros((BLOCK_N, TILE), tl.float32)
    for start in range(0, slabs, AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            tile = tl.load(place + (start + more) * slab_bytes)
            total = _plus_slab(
                total, tile, start + more, x, scales, zeros, order, row, token, x_row, tokens, rows, cols,
                CODE, OFFSET, PACKED, ZEROS, ORDERED, SPAN, GROUP, HIGH, EVEN, PTX,
            )  # fmt: skip
    if GROUP == 0 and not PACKED:
        total *= _block(scales, 0, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
    _finish(total, x, out, out_row, row, tl.where(inside, position, pairs), rows, pairs, False)


@triton.jit
def dequantize_kernel(
    codes, scales, zeros, out, out_row, rows, cols,
    CODE: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, ZEROS: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, slabs). `out` [rows, cols] gets (code - zero) * scale, rounded once."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slab = tl.program_id(1)
    column = tl.arange(0, SPAN)
    mask = (row < rows)[:, None]
    place = codes + slab * (tl.full((), SPAN, tl.int64) * rows) + (row * SPAN)[:, None] + column[None, :]
    tile = tl.load(place, mask=mask, other=0)
    for half in tl.static_range(2 if PACKED else 1):
        span = 2 * slab + half if PACKED else slab
        picked = (tile >> (4 * half)) & 15 if PACKED else tile
        weights = _less(numbers(picked, CODE, OFFSET), zeros, span, row, rows, ZEROS, SPAN, GROUP, HIGH)
        weights *= _block(scales, span, row, rows, SPAN, GROUP, HIGH).to(tl.float32)[:, None]
        at = span * SPAN + column
        target = out + row[:, None].to(tl.int64) * out_row + at[None, :]
        tl.store(target, weights.to(out.dtype.element_ty), mask=mask & (at < cols)[None, :])
