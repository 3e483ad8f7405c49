"""Options of the products in Triton. All of them are for tuning."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator

from pegboard.core.interfaces.options import Options


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError(f"must be a power of two, not {value}")
    return value


PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]


class TritonProductsOptions(Options):
    """Sizes of tiles, and from when on weights are dequantised for a product."""

    most_tokens: Annotated[int, Ge(0)] = 128
    """Products of more tokens dequantise the matrix, into memory for one matrix, and leave the product to torch."""

    block_rows: Annotated[PowerOfTwo, Ge(16), Le(256)] | None = None
    """Rows of the matrix per program: a power of two. By default 64, or 128 for codes of 4 bits without zero points, in
    groups of 64 or more, and 33 tokens or more."""

    warps: Annotated[PowerOfTwo, Ge(1), Le(16)] = 4
    """Warps per program: a power of two."""

    stages: Annotated[int, Ge(1), Le(8)] | None = None
    """Loads that are under way at once, per program. By default 3, or 4 with zero points."""

    waves: Annotated[int, Ge(1), Le(64)] | None = None
    """Programs per multiprocessor, at least: the columns of small matrices are cut until there are so many. By default
    4, or 2 of 128 rows."""
