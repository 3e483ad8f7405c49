"""Which codes of a quantised checkpoint the library multiplies by as they are, and how it takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pegboard.toolkit.model.layouts import Code, Codes, Layout

STEP = 32
"""Columns that share a word in the library's memory: KB of the source."""
_ZERO_BITS = 31
"""The lowest bits of INT4's words: ZERO_BITS of the source."""
_SMALLEST, _LARGEST = 2.0**-126, 2.0**100
"""Magnitudes of scales with which no product with a code is subnormal, which AVX-512 takes for 0, or infinite."""


class NativeCodes(NamedTuple):
    """A matrix as the library takes it, see CodedRow of the source: its Format by name, codes as in `Codes`, and words
    int32 [rows, n] for every `group` columns, all of them if that is 0.
    """

    format: str
    codes: Tensor
    words: Tensor
    group: int


def native_codes(layout: Layout, codes: Codes) -> NativeCodes | None:
    """Return a matrix, on the CPU, whose numbers in the library are `exact` in bf16, bit by bit; None where it has none
    such: another code, columns in an order of their own, groups that 32 does not divide, scales of too many bits.
    """
    if not layout.code.integer or layout.ordered or codes.scales is None:
        return None
    cols, (high, wide) = codes.codes.shape[1] * (2 if layout.code.packed else 1), layout.block
    group = wide if wide < cols else 0
    if high != 1 or group % STEP:
        return None
    if layout.code.packed:
        return _int4(codes, 8 if layout.code is Code.INT4 else 0, group)
    return _bytes(codes, group) if layout.code is Code.INT8 and not layout.zeros else None


def _int4(codes: Codes, middle: int, group: int) -> NativeCodes | None:
    """Return codes with words of a scale and a zero point. `middle` is the zero point of codes that have none."""
    assert codes.scales is not None
    scales = codes.scales.float()
    bits, sizes = scales.view(torch.int32), scales.abs()
    zeros = torch.zeros_like(bits) if codes.zeros is None else codes.zeros.int()
    zeros = zeros + middle
    fit = (bits & _ZERO_BITS == 0) & (sizes >= _SMALLEST) & (sizes <= _LARGEST) & (zeros >= 0) & (zeros <= _ZERO_BITS)
    if not bool(fit.all()):
        return None
    return NativeCodes("int4", codes.codes, (bits | zeros).contiguous(), group)


def _bytes(codes: Codes, group: int) -> NativeCodes | None:
    """Return codes with words of a scale, which has to be a float16 number."""
    assert codes.scales is not None
    scales, halves = codes.scales.float(), codes.scales.half()
    if not bool((halves.float() == scales).all()):
        return None
    return NativeCodes("bytes", codes.codes, halves.view(torch.int16).int().contiguous(), group)
