"""How much Python a call executes, counted in bytecode instructions: a cost that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class TooManySteps(BaseException):
    """A call went past its limit."""


def count_steps(call: Callable[[], object], limit: int = 1 << 62) -> int:
    """Return the instructions that `call` executes in Python (what a library does in C counts as one). Past `limit` it
    is stopped, and the answer is more than `limit`.
    """
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            steps += 1
            if steps > limit:
                raise TooManySteps
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except TooManySteps:
        pass
    finally:
        sys.settrace(before)
    return steps
