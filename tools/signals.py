"""SIGINT and SIGTERM for commands that must not be cut off between two lines of code."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Signals:
    """Within ``with``: before `gentle` they raise KeyboardInterrupt; from then on the first one only sets `stopped`,
    for the code that looks, and another one raises.
    """

    def __init__(self, *numbers: int) -> None:
        self.stopped = False
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM)
        self._gentle = False
        self._before: dict[int, Any] = {}

    def gentle(self) -> None:
        """From now on the caller looks at `stopped`."""
        self._gentle = True

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.stopped or not self._gentle:
            raise KeyboardInterrupt
        self.stopped = True
