"""The Triton functions. Importing this module imports triton.

Tokens of one adapter are computed together, in tiles of BLOCK_T: `tiles` int32 [n, 3] has a tile's slot, its first
place in `order` and how many tokens it has; `order` int32 has the numbers of tokens, adapter after adapter. With FIXED
each token is a tile of its own, and `tiles` int64 [tokens] has its slot. Slots count from 1, and 0 has no adapter; of
each part of a site a slot has RANKS ranks, of which `ranks` int32 [slots, PARTS] are not zero.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _tile(tiles, order, FIXED: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return a program's slot, from 0, its tokens, and which of them there are."""
    tile = tl.program_id(0)
    place = tl.arange(0, BLOCK_T)
    if FIXED:
        slot = tl.load(tiles + tile) - 1
        count = tl.where(slot >= 0, 1, 0)
        return tl.maximum(slot, 0), tile.to(tl.int64) + 0 * place.to(tl.int64), place < count, count
    else:
        count = tl.load(tiles + tile * 3 + 2)
        token = tl.load(order + tl.load(tiles + tile * 3 + 1) + place, mask=place < count, other=0).to(tl.int64)
        return tl.load(tiles + tile * 3).to(tl.int64) - 1, token, place < count, count


@triton.jit
def shrink_kernel(
    x, a, ranks, tiles, order, small, x_row, tokens, cols, each,
    PARTS: tl.constexpr, RANKS: tl.constexpr, FIXED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, blocks of ranks of all parts, pieces of the columns, of `each`): x * a^T of each piece, to `small`
    float32 [pieces, tokens, PARTS * RANKS]. x is [tokens, cols], a [slots, PARTS * RANKS, cols].
    """
    slot, token, there, count = _tile(tiles, order, FIXED, BLOCK_T)
    part = tl.program_id(1) // (RANKS // BLOCK_R)
    first = tl.program_id(1) % (RANKS // BLOCK_R) * BLOCK_R
    rank = tl.load(ranks + slot * PARTS + part)
    if (first < rank) & (count > 0):
        one = part * RANKS + first + tl.arange(0, BLOCK_R)
        begin = tl.program_id(2) * each
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for start in range(begin, tl.minimum(begin + each, cols), BLOCK_K):
            col = start + tl.arange(0, BLOCK_K)
            inside = (col < cols)[None, :]
            left = tl.load(x + token[:, None] * x_row + col[None, :], mask=there[:, None] & inside, other=0.0)
            rows = a + (slot * (PARTS * RANKS) + one)[:, None] * cols + col[None, :]
            right = tl.load(rows, mask=inside, other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        to = small + (tl.program_id(2).to(tl.int64) * tokens + token) * (PARTS * RANKS)
        tl.store(to[:, None] + one[None, :], total, mask=there[:, None])


@triton.jit
def expand_kernel(
    small, b, ranks, blocks, tiles, order, out, out_row, tokens, rows, pieces,
    PARTS: tl.constexpr, RANKS: tl.constexpr, FIXED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, blocks of rows): out [tokens, rows] += small * b^T, with b [slots, rows, RANKS]. `blocks` int32
    [n, 3] has the part of a block, its first row and the end of the part. Pieces are added up in their order.
    """
    slot, token, there, count = _tile(tiles, order, FIXED, BLOCK_T)
    part = tl.load(blocks + tl.program_id(1) * 3)
    rank = tl.load(ranks + slot * PARTS + part)
    if (rank > 0) & (count > 0):
        row = tl.load(blocks + tl.program_id(1) * 3 + 1) + tl.arange(0, BLOCK_N)
        inside = row < tl.load(blocks + tl.program_id(1) * 3 + 2)
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for first in range(0, rank, BLOCK_R):
            one = first + tl.arange(0, BLOCK_R)
            left = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for piece in range(pieces):
                at = small + (piece * tl.full((), 1, tl.int64) * tokens + token) * (PARTS * RANKS) + part * RANKS
                left += tl.load(at[:, None] + one[None, :], mask=there[:, None], other=0.0)
            matrix = b + (slot * rows + row)[:, None] * RANKS + one[None, :]
            right = tl.load(matrix, mask=inside[:, None], other=0.0)
            total = tl.dot(left.to(right.dtype), tl.trans(right), total, input_precision="ieee")
        to = out + token[:, None] * out_row + row[None, :]
        mask = there[:, None] & inside[None, :]
        before = tl.load(to, mask=mask, other=0.0)
        tl.store(to, (before.to(tl.float32) + total).to(before.dtype), mask=mask)
