"""The Triton functions. Importing this module imports triton: only `operations` does, when it first launches one.

All of them compute in float32, whatever they read and write, and round once. 8-bit types are written as bytes that are
made here: neither Triton's interpreter nor its compiler for sm_80 knows how to cast to all of them.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, weight, out, x_outer, x_inner, out_row, eps,
    INNER: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): a program norms one row. INNER rows are x_inner apart, and groups of them x_outer. OFFSET is added
    to the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    first = x + (row // INNER) * x_outer + (row % INNER) * x_inner
    wide = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    wide *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + row * out_row + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, x_row, residual_row, out_row, eps, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows,): a program adds a row to the residual's, and norms the sum as it was rounded there."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    wide = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row * residual_row + at, mask=inside, other=0.0).to(tl.float32)
    rounded = wide.to(residual.dtype.element_ty)
    tl.store(residual + row * residual_row + at, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    wide *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate, up, out, gate_row, up_row, out_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    wide = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(wide))  # which never overflows
    sigmoid = tl.where(wide >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * out_row + at, (wide * sigmoid * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_silu_kernel(
    both, out, both_row, out_row, alpha, limit, plus,
    SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of a row). Gate and up lie side by side, or INTERLEAVED take turns."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    first = both + row * both_row + (2 * at if INTERLEAVED else at)
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + (1 if INTERLEAVED else SIZE), mask=inside, other=0.0).to(tl.float32)
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    small = tl.exp(-tl.abs(gate * alpha))  # which never overflows
    sigmoid = tl.where(gate * alpha >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * out_row + at, (gate * sigmoid * (up + plus)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotations_kernel(
    positions, axes, frequencies, cos, sin, axis_stride, tokens, scaling,
    HALF: tl.constexpr, HAS_AXES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens,). With HAS_AXES each frequency turns with the position along an axis of its own."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (at < HALF)
    place = positions + token
    if HAS_AXES:
        place += tl.load(axes + at, mask=at < HALF, other=0) * axis_stride
    else:
        place += tl.zeros_like(at)
    angle = tl.load(place, mask=inside, other=0).to(tl.float32)
    angle *= tl.load(frequencies + at, mask=at < HALF, other=0.0)
    target = token * HALF + at
    tl.store(cos + target, (tl.cos(angle) * scaling).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + target, (tl.sin(angle) * scaling).to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _byte(x, FORMAT: tl.constexpr):
    """Bytes of float32 values as float8 e4m3 (FORMAT 1) or e5m2 (2), clamped, and rounded to the nearest, ties to even.

    Values below the least normal one are rounded by adding a power of two whose last bit counts what the format's
    least value does; others by adding half of the last bit that stays, in the bits.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    MOST: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    SMALL: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    SHIFT: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    size = tl.where(size > MOST, MOST, size)  # NaN stays
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1) - ((127 - BIAS) << 23)) >> SHIFT
    below = (size + SMALL).to(tl.int32, bitcast=True) & 0xFF
    byte = tl.where(size < LEAST, below, normal)
    return (tl.where(x == x, byte, 0x7F) | sign).to(tl.uint8)


@triton.jit
def _put(place, x, scale, mask, COMPUTE: tl.constexpr, FORMAT: tl.constexpr):
    """Store float32 values as a pool does, which gets them rounded to COMPUTE."""
    rounded = x.to(COMPUTE)
    if FORMAT == 0:
        tl.store(place, rounded.to(place.dtype.element_ty), mask=mask)
    else:
        tl.store(place, _byte(tl.math.div_rn(rounded.to(tl.float32), tl.zeros_like(x) + scale), FORMAT), mask=mask)


@triton.jit
def _turned(
    x, weight, cos, sin, eps, head,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm and turn heads, rows [heads, 1] of pointers `x`: two halves [heads, BLOCK_HALF], and what is not turned
    [heads, BLOCK_REST]; where all is, that is the second half once more.
    """
    at = tl.arange(0, BLOCK_HALF)
    inside = at < HALF
    mask = head & inside[None, :]
    first = tl.load(x + at[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + (HALF + at)[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = second
    if 2 * HALF < DIM:
        beyond = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest = tl.load(x + beyond[None, :], mask=head & (beyond < DIM)[None, :], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if 2 * HALF < DIM:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        first *= factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        second *= factor * tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if 2 * HALF < DIM:
            beyond = 2 * HALF + tl.arange(0, BLOCK_REST)
            rest *= factor * tl.load(weight + beyond, mask=beyond < DIM, other=0.0).to(tl.float32)[None, :]
    c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return first * c - second * s, second * c + first * s, rest


@triton.jit
def _hadamard(first, second, ROWS: tl.constexpr, HALF: tl.constexpr, ROUNDS: tl.constexpr):
    """Heads, in two halves [ROWS, HALF] each, by the orthonormal Hadamard matrix, in two halves again.

    The fast transform of Fino and Algazi (1976) in Pease's constant geometry: each round takes sums and differences
    along the index's last bit, which becomes its first one, so that after all rounds each bit is where it was.
    """
    scale = 1.0 / tl.sqrt(2.0 * HALF)
    x, y = (first + second) * scale, (first - second) * scale
    for _ in tl.static_range(ROUNDS):
        even, odd = tl.split(tl.reshape(x, (ROWS, HALF // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, HALF))
        even, odd = tl.split(tl.reshape(y, (ROWS, HALF // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, HALF))
    return x, y


@triton.jit
def _queries(
    q, out, weight, cos, sin, head, q_head, eps, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Norm and turn the query heads `head` [heads, 1] of the token at `q`, and write them to `out`."""
    real = head < HEADS
    first, second, rest = _turned(
        q + head * q_head, weight, cos, sin, eps, real, DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM
    )
    if ROUNDS > 0:
        first, second = _hadamard(first, second, BLOCK_H, HALF, ROUNDS)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    place = out + head * DIM
    tl.store(place + half, first.to(out.dtype.element_ty), mask=real & (half < HALF))
    tl.store(place + HALF + half, second.to(out.dtype.element_ty), mask=real & (half < HALF))
    if 2 * HALF < DIM:
        at = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        tl.store(place + at, rest.to(out.dtype.element_ty), mask=real & (at < DIM))


@triton.jit
def _store_keys(
    k, keys, weight, cos, sin, head, k_head, key_head, scale, eps, KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr, FORMAT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Norm and turn the key heads `head` [heads, 1] of the token at `k`, and store them at the slot `keys`."""
    real = head < KV_HEADS
    first, second, rest = _turned(
        k + head * k_head, weight, cos, sin, eps, real, DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM
    )
    if ROUNDS > 0:
        first, second = _hadamard(first, second, BLOCK_H, HALF, ROUNDS)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    place = keys + head.to(tl.int64) * key_head  # a pool may have one head's slots before the next one's
    _put(place + half, first, scale, real & (half < HALF), k.dtype.element_ty, FORMAT)
    _put(place + HALF + half, second, scale, real & (half < HALF), k.dtype.element_ty, FORMAT)
    if 2 * HALF < DIM:
        at = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        _put(place + at, rest, scale, real & (at < DIM), k.dtype.element_ty, FORMAT)


@triton.jit
def qk_norm_rope_store_kernel(
    q, k, v, out, keys, values, cos, sin, q_weight, k_weight, slots,
    q_token, q_head, k_token, k_head, v_token, v_head, key_slot, key_head, value_slot, value_head,
    k_scale, v_scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_NORM: tl.constexpr, FORMAT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads and then of KV heads). Queries go to `out` [tokens, heads, dim]. With ROUNDS,
    of which there are log2(HALF), heads of queries and keys are transformed by `_hadamard`.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    head = tl.arange(0, BLOCK_H)[:, None]
    cos += token * HALF
    sin += token * HALF
    if block < Q_BLOCKS:
        _queries(
            q + token * q_token, out + token * HEADS * DIM, q_weight, cos, sin, head + block * BLOCK_H, q_head, eps,
            HEADS, BLOCK_H, DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM, ROUNDS,
        )  # fmt: skip
    else:
        head += (block - Q_BLOCKS) * BLOCK_H
        slot = tl.load(slots + token)  # int64: slots times their stride outgrow 31 bits
        _store_keys(
            k + token * k_token, keys + slot * key_slot, k_weight, cos, sin, head, k_head, key_head, k_scale, eps,
            KV_HEADS, BLOCK_H, DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM, FORMAT, ROUNDS,
        )  # fmt: skip
        at = tl.arange(0, BLOCK_DV)[None, :]
        inside = (head < KV_HEADS) & (at < DV)
        value = tl.load(v + token * v_token + head * v_head + at, mask=inside, other=0.0).to(tl.float32)
        place = values + slot * value_slot + head.to(tl.int64) * value_head + at
        _put(place, value, v_scale, inside, v.dtype.element_ty, FORMAT)


@triton.jit
def gather_indices_kernel(
    table, rows, indptr, firsts, out, table_stride, PAGE: tl.constexpr, HAS_FIRSTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (requests, blocks of pages)."""
    request = tl.program_id(0)
    start = tl.load(indptr + request)
    count = tl.load(indptr + request + 1) - start
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    page = at
    if HAS_FIRSTS:
        page += tl.load(firsts + request).to(tl.int32)
    row = tl.load(rows + request).to(tl.int64)
    slots = tl.load(table + row * table_stride + page * PAGE, mask=inside, other=0)
    tl.store(out + start + at, slots // PAGE, mask=inside)
