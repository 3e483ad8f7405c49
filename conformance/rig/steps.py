"""How much Python a call executes, counted in bytecode instructions: a cost that is the same on every machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any


class TooManySteps(BaseException):
    """A call went past its limit."""


class StepCounter:
    """Counts instructions that run in Python (what a library does in C counts as one), but for those of functions in
    the modules `leave_out`. What takes more than `limit` is stopped, and `count` is then more than `limit`.
    """

    def __init__(self, limit: int = 1 << 62, leave_out: Collection[str] = ()) -> None:
        self.limit, self.leave_out = limit, leave_out
        self.count = 0

    @contextlib.contextmanager
    def counted(self, what: str = "") -> Iterator[None]:
        """Count what this thread runs meanwhile. Raises TooManySteps past the limit."""
        before = sys.gettrace()
        try:
            sys.settrace(self._trace)
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__") in self.leave_out:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count > self.limit:
                raise TooManySteps
        return self._trace


def count_steps(call: Callable[[], object], limit: int = 1 << 62) -> int:
    """Return the instructions that `call` executes in Python. Past `limit` it is stopped, and the answer is more than
    `limit`.
    """
    counter = StepCounter(limit, leave_out={__name__})
    with contextlib.suppress(TooManySteps), counter.counted():
        call()
    return counter.count
