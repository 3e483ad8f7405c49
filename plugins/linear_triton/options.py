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

    block_rows: Annotated[PowerOfTwo, Ge(16), Le(256)] = 64
    """Rows of the matrix per program: a power of two."""

    warps: Annotated[PowerOfTwo, Ge(1), Le(16)] = 4
    """Warps per program: a power of two."""

    stages: Annotated[int, Ge(1), Le(8)] = 3
    """Loads that are under way at once, per program."""

    waves: Annotated[int, Ge(1), Le(64)] = 4
    """Programs per multiprocessor, at least: the columns of small matrices are cut until there are so many."""
