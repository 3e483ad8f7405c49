"""A quantised matrix as the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.layouts import Code, Codes, Layout, unpack

WIDEST = 64
"""Columns of a span at most: 64 bytes are two sectors of memory."""
NARROWEST = 16
"""Columns of a span at least: what the tensor cores multiply at once."""
KINDS = {
    Code.UINT4: (0, 0),
    Code.INT4: (0, 8),
    Code.UINT8: (0, 0),
    Code.INT8: (0, 128),
    Code.E4M3: (1, 0),
    Code.E5M2: (2, 0),
    Code.E2M1: (3, 0),
}
"""How bits become a number, as `decoding` counts the ways, and what is taken from integers before their zero is."""
PLAIN_SCALES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(slots=True)
class Slabs:
    """A matrix [rows, cols]. `codes` uint8 [slabs, rows, span] are what `kernels` says, padded with zeros to whole
    slabs. `scales`, and `zeros` where there are some, are [across, down], with a column of blocks in a row. They have
    blocks for the padding, too, of zeros. With `order` int32 [slabs * columns of a slab], column i of the slabs is
    column order[i] of the matrix, or none for -1.
    """

    layout: Layout
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    rows: int
    cols: int
    span: int
    group: int
    high: int

    @property
    def at_once(self) -> int:
        """Slabs that a program reads in a round, and that there is a multiple of."""
        return WIDEST // self.span

    @property
    def packed(self) -> bool:
        return self.layout.code.packed

    @property
    def width(self) -> int:
        """Columns of all slabs."""
        return self.codes.shape[0] * self.span * (2 if self.packed else 1)

    @property
    def nbytes(self) -> int:
        tensors = self.codes, self.scales, self.zeros, self.order
        return sum(one.nbytes for one in tensors if one is not None)


def slabs_of(name: str, parts: Sequence[tuple[Layout, Codes]]) -> Slabs:
    """Return parts that `mergeable` says go together, one below the other. Raises ModelError for codes that are not
    finite; `name` is what the error calls the matrix.
    """
    layout, first = parts[0]
    high = layout.block[0]
    if len(parts) > 1 and any(one.block[0] != high or codes.codes.shape[0] % high for one, codes in parts):
        high = 1
    numbers = torch.cat([_bytes(name, one.code, codes.codes) for one, codes in parts])
    scales = torch.cat([_blocks(one, codes, codes.scales, high) for one, codes in parts])
    zeros = torch.cat([_blocks(one, codes, codes.zeros, high) for one, codes in parts]) if layout.zeros else None
    if scales.dtype not in PLAIN_SCALES:
        scales = scales.float()
    rows, cols = numbers.shape
    group, order = layout.block[1], None
    span = _span(group)
    if layout.ordered or span < NARROWEST:
        group = group or cols
        of = first.groups if first.groups is not None else torch.arange(cols, device=numbers.device) // group
        order, blocks, span = _sorted(of.long(), scales.shape[1])
        numbers = F.pad(numbers, (0, 1))[:, order]  # -1 is the column that was added
        group, scales = span, scales[:, blocks]
        zeros = None if zeros is None else zeros[:, blocks]
        order = order.int()
    codes = _slabs(numbers, span, WIDEST // span, packed=layout.code.packed)
    width = codes.shape[0] * span * (2 if layout.code.packed else 1)
    across = -(-width // group) if group else 1  # the spans of padding have blocks, too
    scales = F.pad(scales, (0, max(across - scales.shape[1], 0)))
    if zeros is not None:
        zeros = F.pad(zeros, (0, max(across - zeros.shape[1], 0))).t().contiguous()
    if order is not None:
        order = F.pad(order, (0, width - len(order)), value=-1)
    return Slabs(layout, codes, scales.t().contiguous(), zeros, order, rows, cols, span, group, high)


def constants_of(slabs: Slabs) -> dict[str, int | bool | float | str]:
    """Return what kernels are compiled for, as far as it is the matrix's."""
    kind, offset = KINDS[slabs.layout.code]
    return {
        "CODE": kind,
        "OFFSET": offset,
        "PACKED": slabs.packed,
        "ZEROS": slabs.zeros is not None,
        "SPAN": slabs.span,
        "GROUP": slabs.group,
        "HIGH": slabs.high,
        "enable_fp_fusion": True,
    }


def mergeable(one: tuple[Layout, Codes], other: tuple[Layout, Codes]) -> bool:
    """Return whether two parts can be one matrix: of the same codes and groups."""
    (left, some), (right, more) = one, other
    alike = replace(left, block=(1, left.block[1])) == replace(right, block=(1, right.block[1]))
    if not alike or some.groups is None or more.groups is None:
        return alike
    return torch.equal(some.groups, more.groups)


def _bytes(name: str, code: Code, codes: Tensor) -> Tensor:
    """Return codes one in a byte, uint8 [rows, cols], integers without their sign."""
    if code.packed:
        return unpack(codes)
    if code is Code.INT8:
        return codes.view(torch.uint8) ^ 128
    found = codes.view(torch.uint8)
    least = {Code.E4M3: 0x7F, Code.E5M2: 0x7C}.get(code)
    if least is not None and not found.is_meta and bool(((found & 0x7F) >= least).any()):
        raise ModelError(f"{name} has weights that are infinite, or no numbers: the file is damaged; fetch it again")
    return found


def _blocks(layout: Layout, codes: Codes, blocks: Tensor | None, high: int) -> Tensor:
    """Return scales or zeros [down, across], or with `high` 1 a row of them for each row."""
    if blocks is None:
        raise ValueError(f"codes of layout {layout} without scales or zeros")
    if high == layout.block[0]:
        return blocks
    return blocks.repeat_interleave(layout.block[0], 0)[: codes.codes.shape[0]]


def _span(group: int) -> int:
    """Return the largest power of two that divides a group, at most `WIDEST`."""
    return min(group & -group, WIDEST) if group else WIDEST


def _sorted(of: Tensor, groups: int) -> tuple[Tensor, Tensor, int]:
    """Return the columns in the order of their groups, each group padded with -1 to whole spans; the group of each span
    then; and the span. `of` int64 [cols] is each column's group.
    """
    counts = torch.bincount(of, minlength=groups)
    smallest = int(counts[counts > 0].min())
    span = max(min(1 << (smallest.bit_length() - 1), WIDEST), NARROWEST)
    spans = -(-counts // span)
    starts = (spans.cumsum(0) - spans) * span
    columns = torch.argsort(of, stable=True)
    first = counts.cumsum(0) - counts
    place = starts[of[columns]] + torch.arange(len(of), device=of.device) - first[of[columns]]
    order = torch.full((int(spans.sum()) * span,), -1, dtype=torch.int64, device=of.device)
    order[place] = columns
    return order, torch.repeat_interleave(torch.arange(groups, device=of.device), spans), span


def _slabs(numbers: Tensor, span: int, at_once: int, *, packed: bool) -> Tensor:
    """Return uint8 [rows, cols] as uint8 [slabs, rows, span], a multiple of `at_once` slabs."""
    rows, cols = numbers.shape
    wide = span * (2 if packed else 1)
    count = -(-cols // (wide * at_once)) * at_once
    numbers = F.pad(numbers, (0, count * wide - cols)).view(rows, count, wide)
    if packed:
        numbers = numbers[..., :span] | numbers[..., span:] << 4
    return numbers.transpose(0, 1).contiguous()
