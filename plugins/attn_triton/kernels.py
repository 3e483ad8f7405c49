"""The kernels. Importing this module imports triton, so only a backend that is being built does.

All of them follow FlashAttention-2 (Dao, 2023): the softmax is computed online in float32, and in base 2, since exp2 is
one instruction and exp is two; log2(e) is folded into the factor that scales the scores. The decode pair is
Flash-Decoding: partial results over parts of the KV, and a reduction.

WINDOW is 0 for layers that see all keys, 1 for those with a sliding window and 2 for those that attend in chunks.

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

from pegboard.plugins.attn_triton.kernel_parts import (
    count_bits,
    dims_of_keys,
    extend_blocks,
    first_seen,
    online_softmax,
    part_size,
    queries,
    scored_block,
    seen_of_tail,
)


@triton.jit
def extend_kernel(
    q, out, keys, values, sinks, tiles, row_table, rows, start_locs, prefix_lens, new_lens, tail_lens, tail_bits,
    q_token, q_head, out_token, out_head, key_slot, key_head, value_slot, value_head, table_stride,
    window, scale, cap, v_scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TAIL: tl.constexpr,
    CHUNK: tl.constexpr, LATENT: tl.constexpr, KV: tl.constexpr,
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
        positions = tail + count_bits(bits) - 1
        low, high = seen_of_tail(bits, positions, window, tail_len, WINDOW)
    d = dims_of_keys(DV, BLOCK_D, LATENT)
    dv = tl.arange(0, BLOCK_DV)
    q_tile, scales = queries(q, (start + token) * q_token + head * q_head, real, d, dv, scale, D, DV, CHUNK, LATENT, KV)

    # Keys [first, end) are seen by some row. In between lie the blocks that every row sees whole: they need no mask.
    first = 0
    if WINDOW:
        lowest = tail if HAS_TAIL else prefix + first_token
        first = tl.maximum(first_seen(lowest, window, WINDOW), 0)
    blocks = tl.cdiv(end - first, BLOCK_N)
    whole_start = 0
    if WINDOW:
        hidden = first_seen(end - 1, window, WINDOW) - first  # by the last row, which may be in the next chunk
        whole_start = tl.minimum(tl.cdiv(tl.maximum(hidden, 0), BLOCK_N), blocks)
    whole_stop = tl.maximum((tail - first) // BLOCK_N, whole_start)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table_row = row_table + row * table_stride
    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    if WINDOW:
        top, total, acc = extend_blocks(
            0, whole_start, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
            first, end, window, scales, cap, d, dv, tail, low, high,
            D, DV, BLOCK_N, WINDOW, HAS_CAP, HAS_TAIL, CHUNK, LATENT, KV, True,
        )  # fmt: skip
    top, total, acc = extend_blocks(
        whole_start, whole_stop, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
        first, end, window, scales, cap, d, dv, tail, low, high,
        D, DV, BLOCK_N, WINDOW, HAS_CAP, HAS_TAIL, CHUNK, LATENT, KV, False,
    )  # fmt: skip
    top, total, acc = extend_blocks(
        whole_stop, blocks, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
        first, end, window, scales, cap, d, dv, tail, low, high,
        D, DV, BLOCK_N, WINDOW, HAS_CAP, HAS_TAIL, CHUNK, LATENT, KV, True,
    )  # fmt: skip

    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - top)
    total = tl.where(total == 0, 1.0, total)  # a tile without tokens, of which a graph may have some
    acc = acc * (v_scale / total)[:, None]
    tl.store(
        out + (start + token)[:, None] * out_token + head[:, None] * out_head + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (dv < DV)[None, :],
    )


@triton.jit(do_not_specialize=["start"])
def decode_kernel(
    q, out, parts, tops, keys, values, sinks, row_table, rows, tokens, seq_lens,
    q_token, q_head, out_token, out_head, parts_token, parts_split, parts_head, tops_token, tops_split,
    key_slot, key_head, value_slot, value_head, table_stride, window, start, scale, cap, v_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, LATENT: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """One new token per request over one part of its KV from `start` on. Grid (requests, kv heads * head blocks,
    parts).

    A request is cut by its own length, which is read here, as all that differs from step to step; programs after its
    last part leave at once. Where it has one part, that goes to `out`. With SPLIT it may have several: they go to
    `parts`, float32 [requests, parts, heads, v dim], with their base-2 log-sum-exp in `tops` [requests, parts, heads],
    for `reduce_kernel`. So do all parts where `start` is not 0, since those of a shared prefix stand beside them.
    """
    request = tl.program_id(0)
    head_blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // head_blocks
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = start
    if WINDOW:
        first = tl.maximum(first_seen(seq_len - 1, window, WINDOW), start)
    size = part_size(seq_len - first, tl.num_programs(2), LEAST, BLOCK_N)
    whole_request = True
    if SPLIT:
        whole_request = (first + size >= seq_len) & (start == 0)
    first += split * size
    end = tl.minimum(first + size, seq_len)
    if first < end:
        token = tl.load(tokens + request).to(tl.int64)
        row = tl.load(rows + request)
        h = (tl.program_id(1) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        real = h < GROUP
        head = kv_head * GROUP + h
        d = dims_of_keys(DV, BLOCK_D, LATENT)
        dv = tl.arange(0, BLOCK_DV)
        q_tile, scales = queries(q, token * q_token + head * q_head, real, d, dv, scale, D, DV, CHUNK, LATENT, KV)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        table_row = row_table + row * table_stride
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head

        # The newest token sees everything below it: only the block at the end needs a mask.
        whole = (end - first) // BLOCK_N
        for block in range(whole):
            _, s, v = scored_block(
                q_tile, table_row, keys, values, key_slot, value_slot, first + block * BLOCK_N, end, scales, cap, d, dv,
                D, DV, BLOCK_N, CHUNK, HAS_CAP, LATENT, KV, False,
            )  # fmt: skip
            top, total, acc = online_softmax(s, top, total, acc, v)
        if LATENT:
            # A loop as well: what an `if` shares with the loop before it, such as queries, would be kept in registers.
            for block in range(whole, tl.cdiv(end - first, BLOCK_N)):
                n, s, v = scored_block(
                    q_tile, table_row, keys, values, key_slot, value_slot, first + block * BLOCK_N, end, scales, cap, d,
                    dv, D, DV, BLOCK_N, CHUNK, HAS_CAP, LATENT, KV, True,
                )  # fmt: skip
                s = tl.where((n < end)[None, :], s, float("-inf"))
                top, total, acc = online_softmax(s, top, total, acc, v)
        elif first + whole * BLOCK_N < end:
            n, s, v = scored_block(
                q_tile, table_row, keys, values, key_slot, value_slot, first + whole * BLOCK_N, end, scales, cap, d, dv,
                D, DV, BLOCK_N, CHUNK, HAS_CAP, LATENT, KV, True,
            )  # fmt: skip
            s = tl.where((n < end)[None, :], s, float("-inf"))
            top, total, acc = online_softmax(s, top, total, acc, v)

        mask = real[:, None] & (dv < DV)[None, :]
        if whole_request:
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - top)
            answer = out + token * out_token + head[:, None] * out_head + dv[None, :]
            tl.store(answer, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            part = request.to(tl.int64)
            tl.store(tops + part * tops_token + split * tops_split + head, top + tl.log2(total), mask=real)
            place = parts + part * parts_token + split * parts_split + head[:, None] * parts_head + dv[None, :]
            tl.store(place, acc * (v_scale / total)[:, None], mask=mask)


@triton.jit(do_not_specialize=["count", "prefix", "size"])
def prefix_kernel(
    q, parts, tops, keys, values, row_table, rows,
    q_token, q_head, parts_token, parts_split, parts_head, tops_token, tops_split,
    key_slot, key_head, value_slot, value_head, table_stride,
    count, prefix, size, scale, cap, v_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_CAP: tl.constexpr, CHUNK: tl.constexpr, LATENT: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Attend with the new tokens of `count` requests over one part, `size` keys, of the `prefix` keys that all of them
    share. Grid (row tiles, kv heads, parts).

    Rows of tiles are the GROUP query heads of request after request. K and V are found through the first one's row.
    Results are for `reduce_kernel`, as those of `decode_kernel` with SPLIT.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = split * size
    end = tl.minimum(first + size, prefix)
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    request = (r // GROUP).to(tl.int64)
    real = request < count
    head = kv_head * GROUP + r % GROUP
    d = dims_of_keys(DV, BLOCK_D, LATENT)
    dv = tl.arange(0, BLOCK_DV)
    q_tile, scales = queries(q, request * q_token + head * q_head, real, d, dv, scale, D, DV, CHUNK, LATENT, KV)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table_row = row_table + tl.load(rows) * table_stride
    keys += kv_head.to(tl.int64) * key_head
    values += kv_head.to(tl.int64) * value_head
    positions = tl.zeros([BLOCK_M], tl.int32) + end
    whole = (end - first) // BLOCK_N
    top, total, acc = extend_blocks(
        0, whole, top, total, acc, q_tile, positions, table_row, keys, values, key_slot, value_slot,
        first, end, 0, scales, cap, d, dv, end, 0, 0, D, DV, BLOCK_N, False, HAS_CAP, False, CHUNK, LATENT, KV, False,
    )  # fmt: skip
    top, total, acc = extend_blocks(
        whole, tl.cdiv(end - first, BLOCK_N), top, total, acc, q_tile, positions, table_row, keys, values,
        key_slot, value_slot, first, end, 0, scales, cap, d, dv, end, 0, 0,
        D, DV, BLOCK_N, False, HAS_CAP, False, CHUNK, LATENT, KV, True,
    )  # fmt: skip
    tl.store(tops + request * tops_token + split * tops_split + head, top + tl.log2(total), mask=real)
    tl.store(
        parts + request[:, None] * parts_token + split * parts_split + head[:, None] * parts_head + dv[None, :],
        acc * (v_scale / total)[:, None],
        mask=real[:, None] & (dv < DV)[None, :],
    )


@triton.jit(do_not_specialize=["start", "shared", "splits"])
def reduce_kernel(
    parts, tops, out, sinks, tokens, seq_lens,
    parts_token, parts_split, parts_head, tops_token, tops_split, out_token, out_head,
    window, start, shared, splits,
    DV: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Put parts together: `shared` ones of `prefix_kernel`, of all keys before `start`, and behind them those of
    `decode_kernel`, of which there were up to `splits`. Grid (requests, heads).

    Parts that were not computed hold anything, and are not read. A request that had one part has its answer already.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    seen = seq_len - start
    if WINDOW:
        seen = seq_len - tl.maximum(first_seen(seq_len - 1, window, WINDOW), start)
    size = part_size(seen, splits, LEAST, BLOCK_N)
    if (size < seen) | (shared > 0):
        split = tl.arange(0, BLOCK_S)
        dv = tl.arange(0, BLOCK_DV)
        there = (split - shared) * size < seen
        place = tops + request * tops_token + split * tops_split + head
        part_tops = tl.load(place, mask=there, other=float("-inf"))
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
