"""Lines of the log that clients can cause: how often, and how they quote what a client sent."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

MAX_QUOTED = 128
"""Most characters of a client's that a line quotes."""


class LimitedLog:
    """Logs at most `most` lines in any `seconds`; a line after others that were left out says how many.

    For what clients can cause as often as they like.
    """

    def __init__(
        self, logger: logging.Logger, *, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque(maxlen=most)
        self._left_out = 0

    def log(self, level: int, message: str, *args: object) -> None:
        """As of a logger."""
        now = self._clock()
        if len(self._times) == self._times.maxlen and now - self._times[0] < self._seconds:
            self._left_out += 1
            return
        self._times.append(now)
        if self._left_out:
            message, args = message + " (%d more of these were not logged)", (*args, self._left_out)
            self._left_out = 0
        self._logger.log(level, message, *args)


def quoted(text: str) -> str:
    """Return what a client chose, as it may stand in a line of the log: in quotes, on one line, and not endless."""
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "...")
