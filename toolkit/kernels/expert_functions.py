"""The Triton functions of mixtures of experts. Importing this module imports triton.

A *pair* is a token and one of its experts. Pairs are sorted by expert, and within one by token. A tile is at most TILE
positions of one expert. The number of programs depends on the number of tokens alone: those of spare tiles end at
once. `experts` describes the tensors.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits, weights, experts, row,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). Of equal experts the first is taken."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < EXPERTS
    wide = tl.load(logits + token * row + at, mask=inside, other=float("-inf"))
    shares = tl.exp(wide - tl.max(wide, 0))
    shares = tl.where(inside, shares / tl.sum(shares, 0), -1.0)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros((SLOTS,), tl.float32)
    chosen = tl.zeros((SLOTS,), tl.int32)
    for place in range(PER_TOKEN):
        most = tl.max(shares, 0)
        # Where logits are no numbers none is the largest; the number has to be an expert's all the same.
        which = tl.minimum(tl.min(tl.where(shares == most, at, BLOCK), 0), EXPERTS - 1)
        best = tl.where(slot == place, most, best)
        chosen = tl.where(slot == place, which, chosen)
        shares = tl.where(at == which, -1.0, shares)
    if NORMALISED:
        best = best / tl.sum(best, 0)
    place = token * PER_TOKEN + slot
    tl.store(weights + place, best, mask=slot < PER_TOKEN)
    tl.store(experts + place, chosen, mask=slot < PER_TOKEN)


@triton.jit
def group_kernel(
    experts, rows, places, offsets, tiles, pairs, most_tiles, per_token,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of pairs,). Each program counts all pairs, and then places those of its block."""
    block = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        of = tl.load(experts + at, mask=at < pairs, other=-1)
        some = tl.sum((of[:, None] == expert[None, :]).to(tl.int32), 0)
        before += tl.where(start < block * BLOCK, some, 0)
        counts += some
    ends = tl.cumsum(counts, 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    hit = (tl.load(experts + at, mask=at < pairs, other=-1)[:, None] == expert[None, :]).to(tl.int32)
    position = tl.sum(hit * (tl.cumsum(hit, 0) - 1 + (ends - counts + before)[None, :]), 1)
    tl.store(places + at, position, mask=at < pairs)
    tl.store(rows + position, at // per_token, mask=at < pairs)
    if block == 0:
        tl.store(offsets + expert, ends, mask=expert < EXPERTS)
    own = (counts + TILE - 1) // TILE
    last = tl.cumsum(own, 0)
    for start in range(block * BLOCK, most_tiles, tl.num_programs(0) * BLOCK):
        tile = start + tl.arange(0, BLOCK)
        which = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
        hit = (which[:, None] == expert[None, :]).to(tl.int32)
        begin = tl.sum(hit * ((ends - counts)[None, :] + (tile[:, None] - (last - own)[None, :]) * TILE), 1)
        end = tl.sum(hit * ends[None, :], 1)
        mask = tile < most_tiles
        tl.store(tiles + tile * 3, tl.where(which < EXPERTS, which, -1), mask=mask)
        tl.store(tiles + tile * 3 + 1, begin, mask=mask)
        tl.store(tiles + tile * 3 + 2, end, mask=mask)


@triton.jit
def positions_of(tiles, TILE: tl.constexpr):
    """Return the expert of this program's tile, below 0 for none, its positions [TILE], and where they end."""
    place = tiles + tl.program_id(1) * 3
    return tl.load(place), tl.load(place + 1) + tl.arange(0, TILE), tl.load(place + 2)


@triton.jit
def product_kernel(
    x, weights, bias, rows, tiles, out, x_row, out_row, w_expert, w_row, w_col, outputs, cols,
    GATHER: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs, tiles). With GATHER position p has row rows[p] of x, and else row p."""
    expert, position, end = positions_of(tiles, TILE)
    if expert < 0:
        return
    inside = position < end
    source = tl.load(rows + position, mask=inside, other=0).to(tl.int64) if GATHER else position.to(tl.int64)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    # Rows behind the last one are that one: nothing is made of them.
    from_row = tl.minimum(output, outputs - 1).to(tl.int64) * w_row + expert.to(tl.int64) * w_expert
    place = weights + from_row[:, None] + (column * w_col)[None, :]
    left = x + source[:, None] * x_row + column[None, :]
    total = tl.zeros((BLOCK_N, TILE), tl.float32)
    for start in range(0, cols, BLOCK_K):
        if EVEN:
            tile = tl.load(place)
            inputs = tl.load(left, mask=inside[:, None], other=0.0)
        else:
            known = column < cols - start
            tile = tl.load(place, mask=known[None, :], other=0.0)
            inputs = tl.load(left, mask=inside[:, None] & known[None, :], other=0.0)
        total = tl.dot(tile, tl.trans(inputs), total, input_precision="ieee")
        place += BLOCK_K * w_col
        left += BLOCK_K
    if BIAS:
        added = tl.load(bias + expert.to(tl.int64) * outputs + output, mask=output < outputs, other=0.0)
        total = total.to(out.dtype.element_ty).to(tl.float32) + added.to(tl.float32)[:, None]
    mask = (output < outputs)[:, None] & inside[None, :]
    tl.store(
        out + position.to(tl.int64)[None, :] * out_row + output[:, None], total.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def combine_kernel(
    products, weights, places, out, product_row, out_row, size, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (tokens, blocks of columns). The products of a token's pairs times their weights, in the router's order."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + slot).to(tl.int64)
        one = tl.load(products + place * product_row + at, mask=inside, other=0.0).to(tl.float32)
        total += one * tl.load(weights + token * PER_TOKEN + slot)
    tl.store(out + token * out_row + at, total.to(out.dtype.element_ty), mask=inside)
