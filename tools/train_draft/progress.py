"""How far a stage is: a bar on a terminal, otherwise a line now and then; both on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from pegboard.toolkit.system.output import note

LINE_EVERY = 15.0
"""Seconds between two lines, where there is no terminal."""


class Watcher(Protocol):
    """Is told how much is `done`, often, and what else there is to say."""

    def __call__(self, done: float, said: str = "") -> None: ...


@contextlib.contextmanager
def stage(title: str, total: float, done: float, unit: str) -> Iterator[Watcher]:
    """Show a stage that has `total` units to do, of which `done` are done already. `unit` is their name ("tokens")."""
    if not sys.stderr.isatty():
        yield _lines(title, total, done, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]} {task.fields[said]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Drawn when there is news, and not by a thread of its own: the cores belong to the work.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=300, auto_refresh=False) as bar:
        task = bar.add_task(title, total=total, completed=int(done), unit=unit, said="")

        def update(done: float, said: str = "") -> None:
            bar.update(task, completed=min(done, total), said=said)
            bar.refresh()

        yield update


def _lines(title: str, total: float, before: float, unit: str) -> Watcher:
    began = told = time.monotonic()
    complete = False

    def update(done: float, said: str = "") -> None:
        nonlocal told, complete
        now = time.monotonic()
        last = done >= total and not complete
        if now - told < LINE_EVERY and not last:
            return
        told, complete = now, complete or last
        rate = (done - before) / max(now - began, 1e-9)
        left = f", about {max(total - done, 0) / rate / 60:.0f} min left" if rate > 0 and done < total else ""
        note(f"{title}: {done:.0f} of {total:.0f} {unit}, {rate:.1f}/s {said}{left}")

    return update
