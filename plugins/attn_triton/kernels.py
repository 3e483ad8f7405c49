"""The kernels. Importing this module imports triton, so only a backend that is being built does.

All of them follow FlashAttention-2 (Dao, 2023): the softmax is computed online in float32, and in base 2, since exp2 is
one instruction and exp is two; log2(e) is folded into the factor that scales the scores. The decode pair is
Flash-Decoding: partial results over parts of the KV, and a reduction.

Two things are common to them:

- The query heads of one KV head are rows of one tile ("packed GQA"). K and V are loaded once for all of them, and
  `tl.dot`, which wants at least 16 rows, gets real ones even where a request has a single new token.
- Keys and values are found through the row table, one int32 per token, whatever the page size: 4 bytes beside the 256
  and more of a key and value, and mostly out of L1. A slot is looked up and loaded only below the request's length.
  What lies beyond, also in the last page, may be NaN, and 0 * NaN is NaN; so loads are masked, and not products.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _scores(q, k, scale, cap, HAS_CAP: tl.constexpr):
    """Scaled scores of q [rows, dim] and k [dim, keys], in base 2.

    With a cap, `scale` holds 2 log2(e) scale / cap and `cap` log2(e) cap: tanh(x) = 1 - 2 / (1 + exp(2x)) then costs
    one exp2, is right for any x (exp2 overflows to inf, and 2 / inf is 0), and is there in the interpreter, which
    libdevice is not. "ieee" keeps float32 from becoming tf32; it changes nothing for the 16-bit types.
    """
    s = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_CAP:
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
    return s


@triton.jit
def _online_softmax(s, top, total, acc, v):
    """Take scores s [rows, keys] and values v [keys, dim] into the running maximum, sum and output."""
    new_top = tl.maximum(top, tl.max(s, 1))
    # A row may have seen no key yet (the left edge of a window): -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(top - base)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _read_block(
    table_row, keys, values, key_stride, value_stride, start, end, d, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K transposed [dim, keys] and V [keys, v dim] of positions [start, start + BLOCK_N), zeros from `end` on."""
    n = start + tl.arange(0, BLOCK_N)
    # Head dims that are no power of two are padded with zeros. Where they are one, these two masks fold away.
    k_mask = (d < D)[:, None]
    v_mask = (dv < DV)[None, :]
    if MASKED:
        inside = n < end
        slots = tl.load(table_row + n, mask=inside, other=0).to(tl.int64)
        k_mask = k_mask & inside[None, :]
        v_mask = v_mask & inside[:, None]
    else:
        slots = tl.load(table_row + n).to(tl.int64)  # int64: slots times their stride outgrow 31 bits
    k = tl.load(keys + slots[None, :] * key_stride + d[:, None], mask=k_mask, other=0.0)
    v = tl.load(values + slots[:, None] * value_stride + dv[None, :], mask=v_mask, other=0.0)
    return n, k, v


@triton.jit
def _count_bits(x):
    """How many bits of each int64 are set. By steps: the interpreter has no instruction for it."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _seen_of_tail(bits, window, tail_len, HAS_WINDOW: tl.constexpr):
    """Halves, int32, of each row's bits. A window keeps the highest: what a token sees of a tail stands in a row."""
    if HAS_WINDOW:
        more = _count_bits(bits) - window
        for step in range(tail_len - window):
            bits = tl.where(step < more, bits & (bits - 1), bits)
    return bits.to(tl.int32), (bits >> 32).to(tl.int32)


@triton.jit
def _extend_blocks(
    first_block, last_block, top, total, acc, q, positions, table_row, keys, values, key_stride, value_stride,
    first, end, window, scale, cap, d, dv, tail, low, high,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take blocks [first_block, last_block) of keys into the running softmax of a tile of queries."""
    for block in range(first_block, last_block):
        n, k, v = _read_block(
            table_row, keys, values, key_stride, value_stride, first + block * BLOCK_N, end, d, dv,
            D, DV, BLOCK_N, MASKED,
        )  # fmt: skip
        s = _scores(q, k, scale, cap, HAS_CAP)
        if MASKED:
            if HAS_TAIL:
                # Of keys from `tail` on those whose bit is set, of those before it whatever the window leaves.
                bit = tl.maximum(n - tail, 0)
                word = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
                seen = ((word >> (bit & 31)[None, :]) & 1) != 0
                before = (n < tail)[None, :]
                if HAS_WINDOW:
                    before = before & (n[None, :] > positions[:, None] - window)
                    seen = seen & (n >= tail)[None, :]
                seen = (seen | before) & (n < end)[None, :]
            else:
                seen = (n[None, :] <= positions[:, None]) & (n < end)[None, :]
                if HAS_WINDOW:
                    seen = seen & (n[None, :] > positions[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        top, total, acc = _online_softmax(s, top, total, acc, v)
    return top, total, acc


@triton.jit
def extend_kernel(
    q, out, keys, values, sinks, tiles, row_table, rows, start_locs, prefix_lens, new_lens, tail_lens, tail_bits,
    q_token, q_head, out_token, out_head, key_slot, key_head, value_slot, value_head, table_stride,
    window, scale, cap,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Attend with new tokens over cached and new KV. Grid (tiles, kv heads). With HAS_TAIL all requests of the tiles
    have a tail, see ForwardBatch.

    `tiles` int32 [tiles, 2] name a request and the first of the TOKENS new tokens of it that a program computes, for
    the GROUP query heads of its KV head: row r of the tile is token r // GROUP, head r % GROUP. Rows from TOKENS *
    GROUP on are padding (one of 64 for three heads). In the output and the queries a tile's rows are then nearly
    contiguous.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first_token = tl.load(tiles + 2 * tile + 1)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    new = tl.load(new_lens + request).to(tl.int32)
    start = tl.load(start_locs + request)
    row = tl.load(rows + request)

    r = tl.arange(0, BLOCK_M)
    token = first_token + r // GROUP
    head = kv_head * GROUP + r % GROUP
    real = (r < TOKENS * GROUP) & (token < new)
    # Padding rows stand at the last position, so that they see what the others see and stay finite.
    last_token = tl.minimum(first_token + TOKENS, new) - 1
    positions = prefix + tl.minimum(token, last_token)
    end = prefix + last_token + 1  # of the keys that some row sees
    tail = prefix + first_token + 1  # every row sees the keys before it, but for its window
    low = 0
    high = 0
    if HAS_TAIL:
        end = prefix + new
        tail_len = tl.load(tail_lens + request).to(tl.int32)
        tail = end - tail_len
        bits = tl.load(tail_bits + start + tl.minimum(token, last_token))
        positions = tail + _count_bits(bits) - 1
        low, high = _seen_of_tail(bits, window, tail_len, HAS_WINDOW)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_tile = tl.load(
        q + (start + token)[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )

    # Keys [first, end) are seen by some row. In between lie the blocks that every row sees whole: they need no mask.
    first = 0
    if HAS_WINDOW:
        lowest = tail if HAS_TAIL else prefix + first_token
        first = tl.maximum(lowest - window + 1, 0)
    blocks = tl.cdiv(end - first, BLOCK_N)
    whole_start = 0
    if HAS_WINDOW:
        whole_start = tl.minimum(tl.cdiv(tl.maximum(end - window - first, 0), BLOCK_N), blocks)
    whole_stop = tl.maximum((tail - first) // BLOCK_N, whole_start)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table_row = row_table + row * table_stride
    keys += kv_head * key_head
    values += kv_head * value_head
    if HAS_WINDOW:
        top, total, acc = _extend_blocks(
            0, whole_start, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
            first, end, window, scale, cap, d, dv, tail, low, high,
            D, DV, BLOCK_N, HAS_WINDOW, HAS_CAP, HAS_TAIL, True,
        )  # fmt: skip
    top, total, acc = _extend_blocks(
        whole_start, whole_stop, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
        first, end, window, scale, cap, d, dv, tail, low, high,
        D, DV, BLOCK_N, HAS_WINDOW, HAS_CAP, HAS_TAIL, False,
    )  # fmt: skip
    top, total, acc = _extend_blocks(
        whole_stop, blocks, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
        first, end, window, scale, cap, d, dv, tail, low, high,
        D, DV, BLOCK_N, HAS_WINDOW, HAS_CAP, HAS_TAIL, True,
    )  # fmt: skip

    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - top)
    acc = acc / total[:, None]
    tl.store(
        out + (start + token)[:, None] * out_token + head[:, None] * out_head + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (dv < DV)[None, :],
    )


@triton.jit
def decode_kernel(
    q, out, tops, keys, values, sinks, row_table, rows, tokens, seq_lens,
    q_token, q_head, out_token, out_split, out_head, tops_token, tops_split, key_slot, key_head, value_slot, value_head,
    table_stride, window, split_size, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One new token per request over one part of its KV. Grid (requests, kv heads * head blocks, splits).

    With SPLIT, `out` is float32 [requests, splits, heads, v dim] and `tops` [requests, splits, heads] get the base-2
    log-sum-exp, for `reduce_kernel`; without, `out` is the output and there is one part. Everything that differs from
    step to step is read on the device, and splits beyond a request's end return at once.
    """
    request = tl.program_id(0)
    head_blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // head_blocks
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0)
    first += split * split_size
    end = tl.minimum(first + split_size, seq_len)
    if first < end:
        token = tl.load(tokens + request).to(tl.int64)
        row = tl.load(rows + request)
        h = (tl.program_id(1) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        real = h < GROUP
        head = kv_head * GROUP + h
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        q_tile = tl.load(
            q + token * q_token + head[:, None] * q_head + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        table_row = row_table + row * table_stride
        keys += kv_head * key_head
        values += kv_head * value_head

        # The newest token sees everything below it: only the block at the end needs a mask.
        whole = (end - first) // BLOCK_N
        for block in range(whole):
            _, k, v = _read_block(
                table_row, keys, values, key_slot, value_slot, first + block * BLOCK_N, end, d, dv,
                D, DV, BLOCK_N, False,
            )  # fmt: skip
            top, total, acc = _online_softmax(_scores(q_tile, k, scale, cap, HAS_CAP), top, total, acc, v)
        if first + whole * BLOCK_N < end:
            n, k, v = _read_block(
                table_row, keys, values, key_slot, value_slot, first + whole * BLOCK_N, end, d, dv,
                D, DV, BLOCK_N, True,
            )  # fmt: skip
            s = tl.where((n < end)[None, :], _scores(q_tile, k, scale, cap, HAS_CAP), float("-inf"))
            top, total, acc = _online_softmax(s, top, total, acc, v)

        if SPLIT:
            place = request.to(tl.int64)
            tl.store(tops + place * tops_token + split * tops_split + head, top + tl.log2(total), mask=real)
        else:
            place = token
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - top)
        tl.store(
            out + place * out_token + split * out_split + head[:, None] * out_head + dv[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=real[:, None] & (dv < DV)[None, :],
        )


@triton.jit
def reduce_kernel(
    parts, tops, out, sinks, tokens, seq_lens,
    parts_token, parts_split, parts_head, tops_token, tops_split, out_token, out_head, window, split_size,
    DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Put the parts of `decode_kernel` together. Grid (requests, heads).

    Parts that were not computed hold anything, and are not read.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seen = tl.load(seq_lens + request).to(tl.int32)
    if HAS_WINDOW:
        seen = tl.minimum(seen, window)
    split = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    there = split * split_size < seen
    part_tops = tl.load(tops + request * tops_token + split * tops_split + head, mask=there, other=float("-inf"))
    top = tl.max(part_tops, 0)
    weights = tl.exp2(part_tops - top)
    total = tl.sum(weights, 0)
    values = tl.load(
        parts + request * parts_token + split[:, None] * parts_split + head * parts_head + dv[None, :],
        mask=there[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - top)
    result = tl.sum(values * weights[:, None], 0) / total
    token = tl.load(tokens + request).to(tl.int64)
    tl.store(out + token * out_token + head * out_head + dv, result.to(out.dtype.element_ty), mask=dv < DV)
