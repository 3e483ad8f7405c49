"""The kernel. Importing this module imports triton, so only a sampler that is being built does.

A program draws for ROWS rows, one on a GPU, from tiles [ROWS, BLOCK] of their logits. Whatever it decides for a row it
decides from that row alone: loops go on until every row of the tile is done, and rows that are done change no more.

What all filters keep is a head of one order (larger logits first, smaller ids among equals). So nothing is sorted:

- Of the tokens that may still be drawn the one with the largest logit / temperature + Gumbel noise is taken. If fewer
  than top_k tokens and less than top_p of the mass stand before it in the order, it is the best of what is kept. If
  not, the head ends before it, and the best of those before it is tried: as in quickselect, the mass of what is left
  is halved each time, more or less.
- top_k begins with its threshold, which is found among all float32 numbers by halving twice in each pass: top_p asks
  for a share of the mass of top_k, so that has to be known.

All is computed in float32, but for sums: lanes of a tile add up a row in float32 (some 40 numbers each for a
vocabulary of 152k, and more numbers never give a smaller sum), and the lanes are added up in float64.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)
SMALLEST = tl.constexpr(2.0**-126)
NO_ID = tl.constexpr(2**31 - 1)
NO_TOKEN = tl.constexpr(-1)

# Of toolkit.sampling.noise.
GAMMA = tl.constexpr(-0x61C8864680B583EB)
MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)
SPREAD = tl.constexpr(-0x61C88647)
WORD_1 = tl.constexpr(0x7FEB352D)
WORD_2 = tl.constexpr(-0x7B935975)


@triton.jit
def _mixed(z):
    """Apply the finaliser of splitmix64, in int64: masks make its shifts logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def halves(seed, step):
    """Both halves int32 of `noise.keys`."""
    key = _mixed(_mixed(seed + GAMMA) + (step + 1) * GAMMA)
    return ((key << 32) >> 32).to(tl.int32), (key >> 32).to(tl.int32)


@triton.jit
def gumbel(low, high, ids):
    """`noise.gumbel(noise.bits(...))` in float32, right to about 1e-6, also where u is next to 1.

    There -log(u) is twice the area tangent of v / (2 - v), with v = 1 - u: what is lost by rounding u to float32 would
    be the largest noise of all, which decides draws.
    """
    z = ids * SPREAD + low
    z = (z ^ ((z >> 16) & 0xFFFF)) * WORD_1
    z = (z ^ ((z >> 15) & 0x1FFFF) ^ high) * WORD_2
    z = z ^ ((z >> 16) & 0xFFFF)
    near = z >= 0  # u is above 1/2
    distance = (z ^ tl.where(near, -1, 0)) & 0x7FFFFFFF  # to the nearer end of the unit interval, in 2^-32
    part = (distance.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = part / (2.0 - part)
    q = s * s
    series = 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return -tl.log(tl.where(near, 2.0 * s * series, -tl.log(part)))


@triton.jit
def _read(start, at, vocab, real, BLOCK: tl.constexpr):
    """Token ids int32 [1, BLOCK] from `at` on, and logits [ROWS, BLOCK]; minus infinity behind the end."""
    ids = at + tl.arange(0, BLOCK)[None, :]
    values = tl.load(start + ids, mask=(ids < vocab) & real, other=-INFINITY)
    return ids, values


@triton.jit
def _clamped(start, at, vocab, real, BLOCK: tl.constexpr):
    """`_read`, with infinity taken for the largest number."""
    ids, values = _read(start, at, vocab, real, BLOCK)
    return ids, tl.where(values > LARGEST, LARGEST, values)


@triton.jit
def _look(start, vocab, real, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row: the largest logit and the first token that has it, whether anything can be drawn, how many tokens
    are not ruled out, and a logit that at least BLOCK tokens reach (minus infinity for a small vocabulary).
    """
    top = tl.full([ROWS, BLOCK], -INFINITY, tl.float32)
    first = tl.full([ROWS, BLOCK], NO_ID, tl.int32)
    finite = tl.zeros([ROWS, BLOCK], tl.int32)
    wrong = tl.zeros([ROWS, BLOCK], tl.int32)
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        ids, values = _read(start, at, vocab, real, BLOCK)
        finite = finite | (tl.abs(values) <= LARGEST).to(tl.int32)
        wrong = wrong | (values != values).to(tl.int32)
        values = tl.where(values > LARGEST, LARGEST, values)
        count += (values > -INFINITY).to(tl.int32)
        first = tl.where(values > top, ids, first)
        top = tl.where(values > top, values, top)
    peak = tl.max(top, 1)
    token = tl.min(tl.where(top == peak[:, None], first, NO_ID), 1)
    fit = (tl.max(finite, 1) != 0) & (tl.max(wrong, 1) == 0)
    return peak, token, fit, tl.sum(count, 1), tl.min(top, 1)


@triton.jit
def _place(number):
    """Place int64 of a float32 number among all of them."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _number(place):
    """float32 number of a place."""
    bits = place.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(start, vocab, real, size, peak, least, limited, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of rows with more than `size` tokens that are not ruled out, `limited`: the largest number that `size` tokens or
    more reach, or any that `size` tokens reach; and how many do, or 0 if that is not known.

    In each pass three numbers divide what is left. A row that has found it is not moved by further passes.
    """
    low = _place(tl.where((size <= BLOCK) & (least > -INFINITY), least, -LARGEST))
    high = _place(peak) + 1
    reached = tl.zeros([ROWS], tl.int32)
    while tl.max((limited & (low + 1 < high)).to(tl.int32), 0) != 0:
        part = tl.maximum((high - low) // 4, 1)
        one, two, three = low + part, low + tl.maximum((high - low) // 2, 1), high - part
        count_1, count_2, count_3 = _reaching(
            start, vocab, real, _number(one), _number(two), _number(three), ROWS, BLOCK
        )
        found = (count_1 == size) | (count_2 == size) | (count_3 == size)
        high = tl.where(count_3 < size, tl.minimum(high, three), high)
        high = tl.where(count_2 < size, tl.minimum(high, two), high)
        high = tl.where(count_1 < size, tl.minimum(high, one), high)
        reached = tl.where(count_1 >= size, count_1, reached)
        reached = tl.where(count_2 >= size, count_2, reached)
        reached = tl.where(count_3 >= size, count_3, reached)
        low = tl.where(count_1 >= size, tl.maximum(low, one), low)
        low = tl.where(count_2 >= size, tl.maximum(low, two), low)
        low = tl.where(count_3 >= size, tl.maximum(low, three), low)
        high = tl.where(found, low + 1, high)
    return _number(low), reached


@triton.jit
def _reaching(start, vocab, real, one, two, three, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of each row reach each of three numbers [ROWS]."""
    count_1 = tl.zeros([ROWS, BLOCK], tl.int32)
    count_2 = tl.zeros([ROWS, BLOCK], tl.int32)
    count_3 = tl.zeros([ROWS, BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        _, values = _clamped(start, at, vocab, real, BLOCK)
        count_1 += (values >= one[:, None]).to(tl.int32)
        count_2 += (values >= two[:, None]).to(tl.int32)
        count_3 += (values >= three[:, None]).to(tl.int32)
    return tl.sum(count_1, 1), tl.sum(count_2, 1), tl.sum(count_3, 1)


@triton.jit
def _ahead(values, peak, inverse):
    """(logit - peak) / temperature."""
    return (values - peak[:, None]) * inverse[:, None]


@triton.jit
def _before(start, vocab, real, peak, inverse, value, token, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens stand before `token`, which has the logit `value`, and their mass float64, where that of the
    largest logit is 1.
    """
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, vocab, BLOCK):
        ids, values = _clamped(start, at, vocab, real, BLOCK)
        inside = (values > value[:, None]) | ((values == value[:, None]) & (ids < token[:, None]))
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(_ahead(values, peak, inverse)), 0.0)
    return tl.sum(count, 1), tl.sum(mass.to(tl.float64), 1)


@triton.jit
def _best(start, vocab, real, peak, inverse, min_p, low, high, value, token, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens before `token` that min_p leaves the one with the largest logit and noise: the first of them."""
    most = tl.full([ROWS, BLOCK], -INFINITY, tl.float32)
    chosen = tl.full([ROWS, BLOCK], NO_ID, tl.int32)
    for at in range(0, vocab, BLOCK):
        ids, values = _clamped(start, at, vocab, real, BLOCK)
        inside = (values > value[:, None]) | ((values == value[:, None]) & (ids < token[:, None]))
        if tl.max(tl.max(inside.to(tl.int32), 1), 0) != 0:
            ahead = _ahead(values, peak, inverse)
            inside = inside & (tl.exp(ahead) >= min_p[:, None])
            noised = tl.where(inside, ahead + gumbel(low[:, None], high[:, None], ids), -INFINITY)
            chosen = tl.where(noised > most, ids, chosen)
            most = tl.maximum(noised, most)
    best = tl.max(most, 1)
    return tl.min(tl.where(most == best[:, None], chosen, NO_ID), 1)


@triton.jit
def _bounds(
    start, vocab, real, going, peak, inverse, least, count, size, top_p, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return what may be drawn at most, as a logit and a token that all of it stands before: all that is not ruled out,
    or what reaches the threshold of top_k. And which rows have to be asked what stands before a token, and how much
    mass that may be if the token is kept: infinity without top_p.
    """
    value = tl.full([ROWS], -INFINITY, tl.float32)
    token = tl.zeros([ROWS], tl.int32)
    share = tl.full([ROWS], INFINITY, tl.float64)
    limited = going & (size < count)
    shared = going & (top_p < 1.0)
    bounded = shared
    if tl.max(limited.to(tl.int32), 0) != 0:
        threshold, reached = _threshold(start, vocab, real, size, peak, least, limited, ROWS, BLOCK)
        value = tl.where(limited, threshold, value)
        bounded = bounded | (limited & (reached != size))
    if tl.max(shared.to(tl.int32), 0) != 0:
        whole, mass = _before(start, vocab, real, peak, inverse, value, token, ROWS, BLOCK)
        # Of equal logits at the threshold as many count as top_k leaves.
        rest = tl.maximum(size - whole, 0).to(tl.float32) * tl.exp((value - peak) * inverse)
        whole_mass = mass + tl.where(limited, rest, 0.0).to(tl.float64)
        share = tl.where(shared, top_p.to(tl.float64) * whole_mass, share)
    return value, tl.where(limited, vocab, token), bounded, share


@triton.jit
def _draw(
    starts, vocab, real, going, peak, least, count, size, temperature, top_p, min_p, low, high,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token for the rows that are `going`. Each of them has one: the first token in the order is always kept."""
    start = starts[:, None]
    inverse = 1.0 / tl.maximum(temperature, SMALLEST)
    min_p = tl.minimum(min_p, 1.0)
    value, token, bounded, share = _bounds(
        start, vocab, real, going, peak, inverse, least, count, size, top_p, ROWS, BLOCK
    )
    drawn = tl.zeros([ROWS], tl.int32)
    while tl.max(going.to(tl.int32), 0) != 0:
        best = _best(start, vocab, real, peak, inverse, min_p, low, high, value, token, ROWS, BLOCK)
        drawn = tl.where(going, best, drawn)
        there = drawn < vocab  # always, and a mistake would end the process
        logit = tl.load(starts + drawn, mask=going & there, other=0.0)
        logit = tl.where(logit > LARGEST, LARGEST, logit)
        kept = going | (there == 0)
        if tl.max((going & bounded).to(tl.int32), 0) != 0:
            stand, mass = _before(start, vocab, real, peak, inverse, logit, drawn, ROWS, BLOCK)
            kept = (bounded == 0) | (stand == 0) | (there == 0) | ((stand < size) & (mass < share))
        value = tl.where(kept, value, logit)
        token = tl.where(kept, token, drawn)
        going = going & (kept == 0)
    return drawn


# One kernel for batches of any size, wherever their parameters lie: nothing is compiled while requests wait.
@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "steps"],
)
def sample_kernel(
    logits, tokens, temperatures, top_ks, top_ps, min_ps, seeds, steps, count, vocab, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (groups of ROWS of `count` rows,). Writes a token int64 for each row of `logits` float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < count
    starts = logits + row.to(tl.int64) * stride
    inside = real[:, None]
    peak, token, fit, able, least = _look(starts[:, None], vocab, inside, ROWS, BLOCK)
    temperature = tl.load(temperatures + row, mask=real, other=0.0)
    top_k = tl.load(top_ks + row, mask=real, other=1)
    going = fit & (temperature > 0.0) & (top_k != 1)
    if tl.max(going.to(tl.int32), 0) != 0:
        top_p = tl.load(top_ps + row, mask=real, other=1.0)
        min_p = tl.load(min_ps + row, mask=real, other=0.0)
        seed, step = tl.load(seeds + row, mask=real, other=0), tl.load(steps + row, mask=real, other=0)
        low, high = halves(seed, step)
        # What is computed for the other rows of a tile, too, is to stay finite.
        peak, temperature = tl.where(fit, peak, LARGEST), tl.where(going, temperature, 1.0)
        size = tl.where((top_k < 1) | (top_k > vocab), vocab, top_k).to(tl.int32)
        drawn = _draw(
            starts, vocab, inside, going, peak, least, able, size, temperature, top_p, min_p, low, high, ROWS, BLOCK
        )
        token = tl.where(going, drawn, token)
    tl.store(tokens + row, tl.where(fit & (token < vocab), token, NO_TOKEN).to(tl.int64), mask=real)
