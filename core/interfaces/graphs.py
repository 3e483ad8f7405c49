"""Recording what a device is asked to do, to ask for all of it at once later. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
Replay = Callable[[], None]
"""Does again what was recorded: the same operations on the same addresses, with the numbers that are there now."""


class GraphCapture(Protocol):
    """Records graphs. All of them share one memory: what one of them leaves behind, the next replay may overwrite.

    What runs while it records must not look at the device's data, and must not decide anything that may be different
    next time: a replay does not run it again.
    """

    def warm(self, run: Callable[[], T]) -> T:
        """Run something as it will be captured, without recording it: what is compiled or made at a first call must not
        become part of a graph. Return what it returned.
        """

    def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
        """Record what `run` asks for. Return the replay, and what it returned: tensors that each replay fills anew.
        Raises RuntimeError where something cannot be recorded.
        """

    def memory(self) -> int:
        """Return the bytes that all graphs take by now."""
