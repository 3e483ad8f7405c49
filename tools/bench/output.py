"""What the commands of `pegboard bench` show and write."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.output import check_writable, note, write, write_json, write_table

if TYPE_CHECKING:
    from pegboard.tools.bench.load import Progress, Watcher
    from pegboard.tools.bench.records import Record

STOPPED = 130
"""Exit code of what was stopped, as shells have it for Ctrl-C."""


def check_results(json_file: Path | None, plot: Path | None) -> None:
    """Raise PegboardError where results cannot be written: before the long work."""
    if json_file is not None and str(json_file) != "-":
        check_writable(json_file, "--json")
    if plot is not None:
        from pegboard.tools.bench.pictures import check

        check()
        if plot.exists() and not plot.is_dir():
            raise PegboardError(f"--plot: {plot} is not a directory")
        if not plot.exists():
            check_writable(plot, "--plot")


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int], Watcher | None]]:
    """Show how far a run is, given its title and its number of requests: a bar on a terminal, otherwise nothing."""
    if not sys.stderr.isatty():
        yield lambda title, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    # Drawn when there is news, and not by a thread of its own: the cores belong to what is measured.
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False, transient=True) as bar:

        def watcher(title: str, total: int) -> Watcher:
            for old in bar.task_ids:
                bar.remove_task(old)
            task = bar.add_task(title, total=total, said="")

            def watch(news: Progress) -> None:
                failed = f"  {news.failed} failed" if news.failed else ""
                said = f"{news.tokens / max(news.seconds, 1e-9):.0f} tok/s{failed}"
                bar.update(task, completed=news.done + news.failed, said=said)
                bar.refresh()

            return watch

        yield watcher


def show_figures(title: str, runs: list[dict[str, Any]], middle: Mapping[str, Any]) -> None:
    """Show the two tables of a run, or of several runs' medians."""
    from pegboard.tools.bench.report import latencies, totals

    of = f"medians of {len(runs)} runs" if len(runs) > 1 else ""
    write_table((title, of), totals(middle))
    head, rows = latencies(middle)
    if rows:
        write()
        write_table(head, rows)


def tell_failures(runs: list[dict[str, Any]], stopped: str) -> int:
    """On standard error: what did not go well; and the exit code that it means."""
    if stopped:
        note(f"stopped: {stopped}")
    failed = sum(run["failed"] for run in runs)
    unfinished = sum(run["unfinished"] for run in runs)
    if failed:
        note(f"{failed} of {sum(run['requests'] for run in runs)} requests failed:")
        for message, count in _errors(runs).items():
            note(f"  {count} x {message}")
    if unfinished:
        note(f"{unfinished} requests were not sent, or stopped")
    if stopped == "interrupted":
        return STOPPED
    return 1 if failed or unfinished or stopped else 0


def _errors(runs: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for run in runs:
        for error in run["errors"]:
            found[error["message"]] = found.get(error["message"], 0) + error["count"]
    return found


def head(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every JSON file begins with."""
    from pegboard.core import __version__
    from pegboard.tools.bench.report import FORMAT, machine

    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "pegboard": __version__,
        "machine": machine(),
        "settings": dict(settings),
    }


def write_results(data: Mapping[str, Any], file: Path) -> None:
    """Write the JSON, where it is wanted."""
    from pegboard.tools.bench.report import plain

    if str(file) == "-":
        write_json(plain(data))
    else:
        file.write_text(json.dumps(plain(data), indent=2, ensure_ascii=False) + "\n", "utf-8")


def with_records(runs: list[dict[str, Any]], records: list[tuple[float, list[Record]]]) -> list[dict[str, Any]]:
    """Return the runs with each of their requests; `records` have the time of a run's start beside them."""
    return [
        {**run, "records": [one.to_dict(start) for one in found]}
        for run, (start, found) in zip(runs, records, strict=True)
    ]
