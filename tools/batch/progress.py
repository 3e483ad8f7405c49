"""How far `pegboard generate --file` is: a bar on a terminal, otherwise a line now and then; both on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.tools.batch.run import Totals, Watcher

LINE_EVERY = 10.0
"""Seconds between two lines, where there is no terminal."""
BAR_EVERY = 0.2


class _Speed:
    """Tokens per second of late: a run of hours should not show its first minute."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._points = [(time.monotonic(), 0)]

    def update(self, now: float, tokens: int) -> float:
        self._points.append((now, tokens))
        while len(self._points) > 2 and now - self._points[1][0] > self._window:
            self._points.pop(0)
        first, before = self._points[0]
        return (tokens - before) / max(now - first, 1e-9)


@contextlib.contextmanager
def progress(total: int, done: int) -> Iterator[Watcher]:
    """Show a run over `total` requests, of which earlier runs have answered `done`."""
    if not sys.stderr.isatty():
        yield _Lines(total, done)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bar:
        yield _Bar(bar, bar.add_task("", total=total, completed=done, note=""), done)


class _Bar:
    def __init__(self, bar: Any, task: Any, before: int) -> None:
        self._bar = bar
        self._task = task
        self._before = before
        self._speed = _Speed()
        self._told = 0.0

    def __call__(self, totals: Totals, generated: int) -> None:
        now = time.monotonic()
        if now - self._told < BAR_EVERY:
            return
        self._told = now
        failed = f"  {totals.errors} failed" if totals.errors else ""
        note = f"{self._speed.update(now, generated):.0f} tok/s{failed}"
        self._bar.update(self._task, completed=self._before + totals.requests, note=note)


class _Lines:
    def __init__(self, total: int, before: int) -> None:
        self._total = total
        self._before = before
        self._speed = _Speed(3 * LINE_EVERY)
        self._told = time.monotonic()

    def __call__(self, totals: Totals, generated: int) -> None:
        now = time.monotonic()
        if now - self._told < LINE_EVERY:
            return
        self._told = now
        done = self._before + totals.requests
        failed = f", {totals.errors} failed" if totals.errors else ""
        left = ""
        if totals.requests:
            left = f", about {_duration((self._total - done) * totals.seconds / totals.requests)} left"
        speed = self._speed.update(now, generated)
        sys.stderr.write(f"{done} of {self._total} requests{failed}, {speed:.0f} tok/s{left}\n")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
