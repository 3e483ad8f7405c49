"""SIGINT and SIGTERM: handled even if the event loop is busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

LAST_WORDS = 1.0
"""Seconds that the line about a hard end may take to be written."""


class StopSignals:
    """Within this context the signals are told to a loop, as soon as there is one. Python's own handlers run between
    any two lines, so a loop that is busy or stuck does not keep the process alive: it ends hard `seconds` after the
    first signal, unless the context has ended by then. Use it in the main thread.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = threading.Timer(seconds, end_hard, [seconds])
        self._deadline.daemon = True
        self._before: dict[int, Any] = {}
        self._tell: Callable[[], None] | None = None
        self._untold = 0
        self.last = ""
        """Name of the last signal, such as SIGTERM."""

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        for number, handler in self._before.items():
            # What was not set from Python cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def tell(self, loop: asyncio.AbstractEventLoop, heard: Callable[[], None]) -> None:
        """Call `heard` in `loop` for every signal, those that came before included."""

        def tell() -> None:
            # A loop that has closed is past all that a signal would end.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(heard)

        self._tell = tell
        for _ in range(self._untold):
            tell()

    def _heard(self, number: int, frame: object) -> None:
        self.last = signal.Signals(number).name
        if self._tell is None:
            self._untold += 1
        else:
            self._tell()
        if not self._deadline.is_alive():
            with contextlib.suppress(RuntimeError):
                self._deadline.start()


def end_hard(seconds: float) -> None:
    """End this process now. The scheduler process notices that its pipe has closed, and ends too."""
    # In a thread: where the reader of stderr has stalled, another thread may hold the handler's lock for ever.
    message = "the server did not stop within %g s; it ends now, with requests cut off"
    words = threading.Thread(target=logger.critical, args=(message, seconds), daemon=True)
    words.start()
    words.join(LAST_WORDS)
    os._exit(1)
