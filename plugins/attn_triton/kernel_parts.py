"""What the kernels have in common: reading queries, K and V, scores, and the running softmax. Imports triton.

Names have no underscore, since `kernels` takes them from here.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegboard.plugins.attn_triton.widening import narrowed, widen


@triton.jit
def online_softmax(s, top, total, acc, v):
    """Take scores s [rows, keys] and values v [keys, dim] into the running maximum, sum and output.

    float16 has no numbers below 2^-24, and a long context may have many weights p as small as that beside one of 1. So
    its `top` is 15 below the maximum: p is then at most 2^15, exact to 2^-11 from 2^-29 of the largest weight on, and 0
    only below 2^-40 of it. Sums and outputs are as much larger, and base-2 log-sum-exps the same.
    """
    LIFT: tl.constexpr = 15.0 if v.dtype == tl.float16 else 0.0
    new_top = tl.maximum(top, tl.max(s, 1) - LIFT)
    # A row may have seen no key yet (the left edge of a window): -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(top - base)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def products(
    q, keys, slots, inside, d, D: tl.constexpr, CHUNK: tl.constexpr, KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Products float32 [rows, keys] of queries and the keys at `keys` + `slots`.

    `q` is a tile [rows, dim]; with CHUNK, pointers [rows] to queries, of which so many dimensions are taken at a time,
    since products without tensor cores keep whole rows and columns in registers. "ieee" keeps float32 from becoming
    tf32; it changes nothing for the 16-bit types.
    """
    if CHUNK == 0:
        # Head dims that are no power of two are padded with zeros. Where they are one, this mask folds away.
        mask = (d < D)[:, None]
        if MASKED:
            mask = mask & inside[None, :]
        k = tl.load(keys + slots[None, :] + d[:, None], mask=mask, other=0)
        s = tl.dot(q, widen(k, q.dtype, KV, False), input_precision="ieee")
    else:
        s = tl.zeros([q.shape[0], slots.shape[0]], tl.float32)
        for start in range(0, D, CHUNK):
            at = start + tl.arange(0, CHUNK)
            mask = (at < D)[:, None]
            if MASKED:
                mask = mask & inside[None, :]
            k = tl.load(keys + slots[None, :] + at[:, None], mask=mask, other=0)
            some = tl.load(q[:, None] + at[None, :], mask=(at < D)[None, :], other=0.0)
            s = tl.dot(some, widen(k, some.dtype, KV, False), s, input_precision="ieee")
    return s


@triton.jit
def scored_block(
    q, table_row, keys, values, key_stride, value_stride, start, end, scale, cap, d, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    LATENT: tl.constexpr, KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Positions of a block of keys from `start` on, scaled scores [rows, keys] in base 2, and V [keys, v dim] in the
    type of products.

    With LATENT the first DV numbers of a key are its value, and are read once for both; `d` are the others.

    With MASKED nothing is read from `end` on: V is zero there, and scores mean nothing. `q` and `scale` are those that
    `queries` returns.

    With a cap, `scale` holds 2 log2(e) scale / cap and `cap` log2(e) cap: tanh(x) = 1 - 2 / (1 + exp(2x)) then costs
    one exp2, is right for any x (exp2 overflows to inf, and 2 / inf is 0), and is there in the interpreter, which
    libdevice is not.
    """
    n = start + tl.arange(0, BLOCK_N)
    inside = n < end
    v_mask = (dv < DV)[None, :]
    if MASKED:
        slots = tl.load(table_row + n, mask=inside, other=0).to(tl.int64)
        v_mask = v_mask & inside[:, None]
    else:
        slots = tl.load(table_row + n).to(tl.int64)  # int64: slots times their stride outgrow 31 bits
    if LATENT:
        v = tl.load(keys + slots[:, None] * key_stride + dv[None, :], mask=v_mask, other=0)
        s = products(q[1], keys, slots * key_stride, inside, d, D, CHUNK, KV, MASKED)
        s = tl.dot(q[0], tl.trans(v), s, input_precision="ieee") * scale
    else:
        s = products(q, keys, slots * key_stride, inside, d, D, CHUNK, KV, MASKED) * scale
        v = tl.load(values + slots[:, None] * value_stride + dv[None, :], mask=v_mask, other=0)
    if HAS_CAP:
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
    if not LATENT:
        TYPE: tl.constexpr = q.dtype if CHUNK == 0 else q.dtype.element_ty
        v = widen(v, TYPE, KV, True)
    return n, s, v


@triton.jit
def dims_of_keys(DV: tl.constexpr, BLOCK_D: tl.constexpr, LATENT: tl.constexpr):
    """Dimensions of keys whose products are computed together; with LATENT those after the first DV."""
    d = tl.arange(0, BLOCK_D)
    if LATENT:
        d += DV
    return d


@triton.jit
def queries(
    q, places, real, d, dv, scale,
    D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, LATENT: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Load a tile [rows, dim] of the queries at `q` + `places` [rows], with zeros where they are not `real`. With CHUNK
    return pointers to them instead; those that are not real point to the first of all. With LATENT return two tiles:
    of the dimensions `dv`, and of `d`.

    The tile is of the type of products. Return also what scales its scores: `scale`, or [rows, 1] where rows were
    divided by different numbers, see `narrowed`.
    """
    if CHUNK == 0:
        tile = tl.load(q + places[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        if KV > 0 and tile.dtype == tl.bfloat16:
            tile, factors = narrowed(tile)
            scale = scale * factors
        if LATENT:
            latent = tl.load(q + places[:, None] + dv[None, :], mask=real[:, None] & (dv < DV)[None, :], other=0.0)
            tile = (latent, tile)
    else:
        tile = q + tl.where(real, places, 0)
    return tile, scale


@triton.jit
def part_size(seen, parts, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of each of so many parts of a request that sees `seen`: whole blocks, and no fewer than LEAST."""
    return tl.maximum(tl.cdiv(tl.cdiv(seen, parts), BLOCK_N) * BLOCK_N, LEAST)


@triton.jit
def count_bits(x):
    """How many bits of each int64 are set. By steps: the interpreter has no instruction for it."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 0x7F).to(tl.int32)


@triton.jit
def first_seen(positions, window, WINDOW: tl.constexpr):
    """Positions of the first keys that queries see; of a sliding window it may be less than 0."""
    if WINDOW == 2:
        first = positions // window * window
    else:
        first = positions - window + 1
    return first


@triton.jit
def seen_of_tail(bits, positions, window, tail_len, WINDOW: tl.constexpr):
    """Halves, int32, of each row's bits. A window keeps the highest: what a token sees of a tail stands in a row."""
    if WINDOW:
        more = count_bits(bits) - (positions - first_seen(positions, window, WINDOW) + 1)
        steps = tail_len - 1 if WINDOW == 2 else tail_len - window
        for step in range(steps):
            bits = tl.where(step < more, bits & (bits - 1), bits)
    return bits.to(tl.int32), (bits >> 32).to(tl.int32)


@triton.jit
def extend_blocks(
    first_block, last_block, top, total, acc, q, positions, table_row, keys, values, key_stride, value_stride,
    first, end, window, scale, cap, d, dv, tail, low, high,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_TAIL: tl.constexpr, CHUNK: tl.constexpr, LATENT: tl.constexpr, KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take blocks [first_block, last_block) of keys into the running softmax of a tile of queries."""
    for block in range(first_block, last_block):
        n, s, v = scored_block(
            q, table_row, keys, values, key_stride, value_stride, first + block * BLOCK_N, end, scale, cap, d, dv,
            D, DV, BLOCK_N, CHUNK, HAS_CAP, LATENT, KV, MASKED,
        )  # fmt: skip
        if MASKED:
            if HAS_TAIL:
                # Of keys from `tail` on those whose bit is set, of those before it whatever the window leaves.
                bit = tl.maximum(n - tail, 0)
                word = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
                seen = ((word >> (bit & 31)[None, :]) & 1) != 0
                before = (n < tail)[None, :]
                if WINDOW:
                    before = before & (n[None, :] >= first_seen(positions, window, WINDOW)[:, None])
                    seen = seen & (n >= tail)[None, :]
                seen = (seen | before) & (n < end)[None, :]
            else:
                seen = (n[None, :] <= positions[:, None]) & (n < end)[None, :]
                if WINDOW:
                    seen = seen & (n[None, :] >= first_seen(positions, window, WINDOW)[:, None])
            s = tl.where(seen, s, float("-inf"))
        top, total, acc = online_softmax(s, top, total, acc, v)
    return top, total, acc
