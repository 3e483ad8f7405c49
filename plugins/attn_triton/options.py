"""Options of the Triton kernels. All of them are for tuning: the defaults follow from the model and the device."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from pegboard.core.interfaces.options import Options


def _power_of_two(value: int) -> int:
    if value < 16 or value & (value - 1):
        raise ValueError(f"must be a power of two of at least 16, not {value}")
    return value


Block = Annotated[int, AfterValidator(_power_of_two)]


class TritonAttentionOptions(Options):
    """Sizes of the kernels' blocks."""

    block_rows: Block | None = None
    """Query rows (tokens times the query heads of one KV head) that an extend program computes. By default by head size
    and batch, 16 to 128."""

    block_keys: Block | None = None
    """Keys that a program reads at a time. By default 32 to 128, by head size."""

    kv_split: Block | None = None
    """Tokens of KV that one decode program reads. By default as many as keep every multiprocessor busy twice over."""
