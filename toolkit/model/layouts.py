"""What the numbers of a quantised matrix mean: a small vocabulary of layouts, and one formula for all of them.

value = (code - zero) * scale, computed in float32 and rounded to the type of the model once. `exact` is that formula.
What multiplies by such a matrix may keep it as it likes, and is compared with this.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch
from torch import Tensor


class Code(enum.Enum):
    """How a number is coded. Codes of 4 bits lie two in a byte, the first of them in its low bits."""

    PLAIN = "unquantised"
    """As itself, in any float type of 16 bits or more, and without scales."""
    INT4 = "int4"
    """-8 to 7, in 4 bits that hold 8 more."""
    UINT4 = "uint4"
    INT8 = "int8"
    UINT8 = "uint8"
    E4M3 = "e4m3"
    """float8_e4m3fn."""
    E5M2 = "e5m2"
    E2M1 = "e2m1"
    """A sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0)."""
    NF4 = "nf4"
    """16 quantiles of a normal distribution, -1 to 1 (Dettmers et al. 2023, QLoRA, appendix E)."""
    FP4 = "fp4"
    """A sign and one of eight numbers up to 1, as bitsandbytes has them."""

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self in (Code.INT4, Code.UINT4) or self in TABLES

    @property
    def integer(self) -> bool:
        """Whether codes are whole numbers."""
        return self in (Code.INT4, Code.UINT4, Code.INT8, Code.UINT8)

    @property
    def bits(self) -> int:
        """Bits of a code; 0 for PLAIN, where the tensor's type says it."""
        return 0 if self is Code.PLAIN else 4 if self.packed else 8


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
TABLES = {
    Code.E2M1: (*_E2M1, *(-value for value in _E2M1)),
    Code.FP4: (*_FP4, *(-value for value in _FP4)),
    Code.NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip
"""The numbers of codes that are looked up."""
_AT_ONCE = 2**20
"""Numbers that become float32 at once: so few that a CPU's caches hold them."""
_AT_ONCE_ON_GPU = 2**24
"""On a GPU each such piece takes ten launches, in every decode step and for every matrix, so the pieces are larger. One
takes 0.2 GB.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a matrix [rows, cols] is kept.

    One scale stands for a block of `block` rows and columns, (1, 128) or (128, 128), and 0 stands for all columns.
    Blocks at the edges are cut where they do not divide the matrix. With `zeros` each block has an integer zero, too.
    With `ordered` the columns of a block are not neighbours: `Codes.groups` says which block a column is of.
    """

    code: Code
    block: tuple[int, int] = (1, 0)
    zeros: bool = False
    ordered: bool = False

    def __str__(self) -> str:
        """Return it for the log: ``e4m3 128x128``, ``uint4 1x64 zeros``."""
        if self.code is Code.PLAIN:
            return "unquantised"
        rows, cols = self.block
        told = [self.code.name.lower(), f"{rows}x{cols or 'row'}"]
        return " ".join([*told, *(["zeros"] if self.zeros else []), *(["ordered"] if self.ordered else [])])

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return how many scales a matrix [rows, cols] has, down and across."""
        high, wide = self.block[0], self.block[1] or cols
        return -(-rows // high), -(-cols // wide)


PLAIN = Layout(Code.PLAIN)


@dataclass(slots=True)
class Codes:
    """The tensors of a matrix, on one device, row after row. [rows, cols] `codes` are uint8 [rows, cols / 2] where two
    share a byte. `scales`, any float type, and `zeros`, uint8 or int8, have the shape of `Layout.grid`. `groups` int32
    [cols] is the block of each column, below the grid's width. PLAIN codes have none of these.
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    groups: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in (self.codes, self.scales, self.zeros, self.groups) if one is not None)


def cut_codes(layout: Layout, codes: Codes, dim: int, start: int, stop: int) -> Codes:
    """Return the codes of rows (`dim` 0) or columns (1) [start, stop) alone, in memory of their own. Raises ValueError
    where these begin or end within a block, or columns of a block are not neighbours.
    """
    rows, cols = codes.codes.shape[0], codes.codes.shape[1] * (2 if layout.code.packed else 1)
    size = (layout.block[dim] or cols) if codes.scales is not None else 1
    full = (rows, cols)[dim]
    if dim == 1 and (layout.ordered or (layout.code.packed and (start % 2 or stop % 2))):
        raise ValueError("columns are not cut where those of a block are not neighbours")
    whole = size >= full
    if not whole and (start % size or (stop % size and stop < full)):
        raise ValueError(f"[{start}, {stop}) does not begin and end with a block of {size}")

    def part(tensor: Tensor | None, step: int) -> Tensor | None:
        if tensor is None or not step:
            return tensor
        return tensor.narrow(dim, start // step, -(-stop // step) - start // step).clone()

    own = part(codes.codes, 2 if dim and layout.code.packed else 1)
    assert own is not None
    step = 0 if whole else size
    return Codes(own, part(codes.scales, step), part(codes.zeros, step), codes.groups)


def exact(layout: Layout, codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the matrix [rows, cols] that codes mean: (code - zero) * scale in float32, rounded to `dtype` once.

    Some rows at a time, so that little memory is needed beside it. Nothing looks at data.
    """
    if layout.code is Code.PLAIN:
        return codes.codes.to(dtype)
    rows, cols = codes.codes.shape[0], codes.codes.shape[1] * (2 if layout.code.packed else 1)
    step = rows_at_once(layout, rows, cols, codes.codes.device)
    found = torch.empty(rows, cols, dtype=dtype, device=codes.codes.device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        values = _numbers(layout.code, codes.codes[part])
        if codes.zeros is not None:
            values.sub_(_spread(codes.zeros, part, layout, codes, cols))
        if codes.scales is not None:
            values.mul_(_spread(codes.scales, part, layout, codes, cols))
        found[part] = values
    return found


def rows_at_once(layout: Layout, rows: int, cols: int, device: torch.device) -> int:
    """Return how many rows of a matrix become numbers at once: whole blocks of rows, or rows of one block."""
    high = layout.block[0]
    step = max((_AT_ONCE_ON_GPU if device.type == "cuda" else _AT_ONCE) // cols, 1)
    return -(-step // high) * high if high < rows else step


def _numbers(code: Code, codes: Tensor) -> Tensor:
    """Return what codes stand for before zeros and scales: a new float32 [rows, cols]."""
    if not code.packed:
        return codes.to(torch.float32, copy=True)
    if code in TABLES:
        return _table(code, codes.device)[unpack(codes).int()]
    return unpack(codes).float().sub_(8.0 if code is Code.INT4 else 0.0)


@functools.cache
def _table(code: Code, device: torch.device) -> Tensor:
    """Return the numbers of all codes, float32 [16]: made once, since a graph cannot bring them to a device."""
    return torch.tensor(TABLES[code], device=device)


def _spread(blocks: Tensor, part: slice, layout: Layout, codes: Codes, cols: int) -> Tensor:
    """Return what each number of some rows has of its block: float32 [rows, cols], or what broadcasts to that."""
    high, wide = layout.block[0], layout.block[1] or cols
    first, last = part.start // high, -(-part.stop // high)
    found = blocks[first:last].float()
    if codes.groups is not None:
        found = found.index_select(1, codes.groups)
    elif found.shape[1] > 1:
        found = _repeated(found, wide)[:, :cols]
    if high == 1 or last - first == 1:
        return found
    return _repeated(found.t(), high).t()[: part.stop - part.start]


def _repeated(blocks: Tensor, times: int) -> Tensor:
    """Return each column so many times."""
    return blocks[:, :, None].expand(-1, -1, times).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """Return the halves of bytes uint8 [..., n] as uint8 [..., 2 n], the low ones first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack(nibbles: Tensor) -> Tensor:
    """Undo `unpack`: make bytes of uint8 below 16, of which the last dimension has an even count."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4
