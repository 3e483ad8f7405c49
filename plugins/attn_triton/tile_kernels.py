"""Kernels that list, on the device, what the kernels of a batch with prompts work on. Importing this imports triton.

How many entries a list has is known on the host; what they are follows from lengths that are on the device anyway. So
a batch's plan brings nothing there.
"""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def listed(at, real, new_lens, tail_lens, HAS_TAIL: tl.constexpr, KIND: tl.constexpr):
    """Return the new tokens of the requests `at`, 0 for those that are not of the kind: several new tokens (0) or one
    (1), both without a tail, or a tail (2).
    """
    new = tl.load(new_lens + at, mask=real, other=0).to(tl.int32)
    wanted = new == 1 if KIND == 1 else new > 1
    if HAS_TAIL:
        tail = tl.load(tail_lens + at, mask=real, other=0)
        wanted = tail > 0 if KIND == 2 else wanted & (tail == 0)
    return tl.where(wanted, new, 0)


@triton.jit(do_not_specialize=["count", "tokens", "most"])
def tiles_kernel(
    tiles, new_lens, prefix_lens, tail_lens, count, tokens, most,
    HAS_TAIL: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write int32 [tiles, 2], (request, first new token), that cover the new tokens of all requests of a kind,
    `tokens` to a tile. Grid (requests).

    Those with the most keys come first, so that the last ones to run are short: requests by their keys, and of each its
    last tokens first. A request's tiles stand behind those of all that come before it, which each program counts. Of
    the `most` tiles that there is room for, those behind the last one are of the last request, which then has no keys.
    """
    request = tl.program_id(0)
    steps = tl.arange(0, BLOCK)
    own = tl.load(new_lens + request).to(tl.int32)
    own_keys = tl.load(prefix_lens + request).to(tl.int32) + own
    before = 0
    mine = 0
    total = 0
    for start in range(0, count, BLOCK):
        at = start + steps
        real = at < count
        new = listed(at, real, new_lens, tail_lens, HAS_TAIL, KIND)
        keys = tl.load(prefix_lens + at, mask=real, other=0).to(tl.int32) + new
        needed = (new + tokens - 1) // tokens
        earlier = (keys > own_keys) | ((keys == own_keys) & (at < request))
        before += tl.sum(tl.where(earlier, needed, 0), 0)
        mine += tl.sum(tl.where(at == request, needed, 0), 0)
        total += tl.sum(needed, 0)
    if request == count - 1:
        for start in range(total, most, BLOCK):
            place = start + steps
            tl.store(tiles + 2 * place, request, mask=place < most)
            tl.store(tiles + 2 * place + 1, 0, mask=place < most)
    for start in range(0, mine, BLOCK):
        place = start + steps
        entry = tiles + 2 * (before + place)
        tl.store(entry, request, mask=place < mine)
        tl.store(entry + 1, (mine - 1 - place) * tokens, mask=place < mine)


@triton.jit(do_not_specialize=["count", "most"])
def singles_kernel(
    found_rows, found_lens, found_tokens, rows, seq_lens, start_locs, new_lens, tail_lens, count, most,
    HAS_TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row, the length and the packed token, int64 [n], of each request that brings one new token and no tail,
    in the batch's order. Of the `most` that there is room for, those behind the last one have a length of 0. Grid
    (requests).
    """
    request = tl.program_id(0)
    steps = tl.arange(0, BLOCK)
    before = 0
    mine = 0
    total = 0
    for start in range(0, count, BLOCK):
        at = start + steps
        new = listed(at, at < count, new_lens, tail_lens, HAS_TAIL, 1)
        before += tl.sum(tl.where(at < request, new, 0), 0)
        mine += tl.sum(tl.where(at == request, new, 0), 0)
        total += tl.sum(new, 0)
    if request == count - 1:
        for start in range(total, most, BLOCK):
            place = start + steps
            zeros = tl.zeros([BLOCK], tl.int64)
            tl.store(found_rows + place, zeros, mask=place < most)
            tl.store(found_lens + place, zeros, mask=place < most)
            tl.store(found_tokens + place, zeros, mask=place < most)
    if mine > 0:
        tl.store(found_rows + before, tl.load(rows + request))
        tl.store(found_lens + before, tl.load(seq_lens + request))
        tl.store(found_tokens + before, tl.load(start_locs + request))
