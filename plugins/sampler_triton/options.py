"""Options of the Triton sampler. All of them are for tuning: a draw depends on none of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from pegboard.core.interfaces.options import Options

SMALLEST, LARGEST = 16, 2**14


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError(f"must be a power of two, not {value}")
    return value


def _block(value: int) -> int:
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"must be from {SMALLEST} to {LARGEST}, not {value}")
    return _power_of_two(value)


class TritonSamplerOptions(Options):
    """Sizes of the kernel's tiles."""

    block: Annotated[int, AfterValidator(_block)] = 4096
    """Logits of a row that a program reads at a time: a power of two. A smaller vocabulary is read at once."""

    rows: Annotated[int, AfterValidator(_power_of_two)] | None = None
    """Rows of the batch per program: a power of two. By default 1 on a GPU, so that each row has its own
    multiprocessor, and all rows in Triton's interpreter, which runs programs one after the other."""
