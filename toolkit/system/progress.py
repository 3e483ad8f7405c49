"""Progress of long work, such as reading weights: log lines, or a program's own display."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds of work before a line about it: what is over sooner needs none."""
LINE_SECONDS = 10.0
"""Seconds between lines about work whose end is not known."""
_TICK = 0.25


class Display(Protocol):
    """Shows one piece of work."""

    def show(self, share: float | None, seconds: float) -> None:
        """Say how far it is: from 0 to 1, or None where that is not known, after so many seconds."""

    def close(self) -> None:
        """Take away what is shown: the work has ended, or has failed."""


class LogLines:
    """A line per tenth of the work, or every LINE_SECONDS."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = 0

    def show(self, share: float | None, seconds: float) -> None:
        step = int(seconds / LINE_SECONDS) if share is None else int(share * 10)
        if step <= self._said or seconds < PATIENCE:
            return
        self._said = step
        done = "" if share is None else f"{step * 10}%, "
        extra = {"event": "progress", "work": self._what, "share": share, "seconds": round(seconds, 3)}
        logger.info("%s: %s%.0f s", self._what, done, seconds, extra=extra)

    def close(self) -> None:
        """Leave the lines where they are."""


class Bar:
    """A bar on standard error, which is a terminal; it goes when the work ends."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(what, total=None)
        self._bar.start()

    def show(self, share: float | None, seconds: float) -> None:
        self._bar.update(self._task, total=None if share is None else 1.0, completed=share or 0.0)

    def close(self) -> None:
        self._bar.stop()


_display: Callable[[str], Display] = LogLines


@contextlib.contextmanager
def shown_by(display: Callable[[str], Display]) -> Iterator[None]:
    """Have `display` show all work within, in all threads; it is called with what is done, such as "reading
    weights".
    """
    global _display
    before, _display = _display, display
    try:
        yield
    finally:
        _display = before


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Around long work: call what it yields with how much more of `total` is done. Without a total only the time is
    shown. A thread does so four times a second, so a call costs next to nothing.
    """
    done, over, began = 0, threading.Event(), time.monotonic()
    display = _display(what)

    def advance(more: int) -> None:
        nonlocal done
        done += more

    def watch() -> None:
        while not over.wait(_TICK):
            display.show(min(1.0, done / total) if total else None, time.monotonic() - began)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        over.set()
        thread.join()
        display.close()
