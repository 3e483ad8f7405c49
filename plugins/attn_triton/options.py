"""Options of the Triton kernels. All of them are for tuning: the defaults follow from the model and the device."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from pegboard.core.interfaces.options import Options


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError(f"must be a power of two, not {value}")
    return value


def _block(value: int) -> int:
    if value < 16 or value & (value - 1):
        raise ValueError(f"must be a power of two of at least 16, not {value}")
    return value


Block = Annotated[int, AfterValidator(_block)]


class TritonAttentionOptions(Options):
    """Sizes of the kernels' blocks."""

    block_rows: Block | None = None
    """Query rows (tokens times the query heads of one KV head) per extend program. By default 16 to 128, by head size
    and batch."""

    block_keys: Block | None = None
    """Keys that a program reads at a time. By default 16 to 128, by head size."""

    warps: Annotated[int, Field(le=16), AfterValidator(_power_of_two)] | None = None
    """Warps per program, of 32 threads each. By default 4 or 8, by head size and device."""

    stages: Annotated[int, Field(ge=1, le=8)] | None = None
    """Stages of the pipeline that loads keys and values. By default 2 to 5, by head size and device. 5 load two blocks
    of keys ahead, because K and V are reached through the row table."""

    kv_split: Block | None = None
    """Smallest number of KV tokens per decode program; a request with fewer is not split. By default 128, or one block
    of keys if that is more."""

    kv_parts: Annotated[int, Field(le=64), AfterValidator(_power_of_two)] | None = None
    """Maximum number of parts into which a decode splits a request's KV. By default as many as give each multiprocessor
    two programs, which depends on the number of requests and not on their lengths."""
