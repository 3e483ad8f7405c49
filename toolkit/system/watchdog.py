"""Watchdog: ends a process that hangs, and leaves the traceback of every thread."""

from __future__ import annotations

import faulthandler
import time


class Watchdog:
    """Ends the process, with every thread's traceback, when one step takes longer than `timeout` seconds.

    The timer is faulthandler's own thread, which fires even where a step holds the interpreter lock. It is set anew
    only when a quarter of the time has passed, so a step costs a clock reading, and may take a quarter more.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._set_at = float("-inf")

    def step_begins(self) -> None:
        """Note that a step begins, and that the one before has ended."""
        now = time.monotonic()
        if now - self._set_at > self._timeout / 4:
            faulthandler.dump_traceback_later(self._timeout * 1.25, exit=True)
            self._set_at = now

    def rest(self) -> None:
        """Note that no step is under way, for as long as it may take."""
        faulthandler.cancel_dump_traceback_later()
        self._set_at = float("-inf")
