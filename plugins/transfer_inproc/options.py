"""What a test may want of copies within a process."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class InprocOptions(Options):
    """Options of the engine `inproc`. By default it is fast, and nothing goes wrong."""

    bytes_per_poll: Annotated[int, Field(gt=0)] = 4 * 2**20
    """Bytes that are copied at a time, while the scheduler's loop waits."""
    delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before a read's first byte."""
    bytes_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Speed of all reads together in bytes per second; 0: as fast as they are polled."""
    linger: Annotated[float, Field(ge=0)] = 0.0
    """Seconds for which an abandoned read is still written before it ends."""
    fail_every: Annotated[int, Field(ge=0)] = 0
    """Every n-th read fails halfway; 0: none."""
    stall_every: Annotated[int, Field(ge=0)] = 0
    """Every n-th read stops halfway, until it is abandoned; 0: none."""
    shuffle: bool = False
    """Let later reads end before earlier ones."""
