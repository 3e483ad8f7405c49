"""Printing of the commands."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.progress import shown_by

if TYPE_CHECKING:
    from rich.status import Status


def write(text: str = "") -> None:
    """Write a line of a result to standard output, with a ? for each character that its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{text}\n".encode(encoding, "replace").decode(encoding))


def note(text: str) -> None:
    """Write a line for the user to standard error: it is not part of the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def quiet_logging(level: str) -> None:
    """For commands that answer in this process. The user wants the answer: what was chosen to give it is told at
    `log_level: debug` only.
    """
    logging.basicConfig(
        level="WARNING" if level == "info" else level.upper(),
        format=logging.BASIC_FORMAT if level == "debug" else "%(levelname)s: %(message)s",
        stream=sys.stderr,
    )
    for number in (logging.WARNING, logging.ERROR):
        logging.addLevelName(number, logging.getLevelName(number).lower())


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Something that takes long: shown on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status, shown_by(lambda what: _InSpinner(status, text, what)):
        yield


class _InSpinner:
    """Progress within a spinner, in its text."""

    def __init__(self, status: Status, text: str, what: str) -> None:
        self._status, self._text, self._what = status, text, what

    def show(self, share: float | None, seconds: float) -> None:
        done = f"{seconds:.0f} s" if share is None else f"{share:.0%}"
        self._status.update(f"{self._text} {self._what}: {done}")

    def close(self) -> None:
        self._status.update(self._text)


@contextlib.contextmanager
def files(option: str) -> Iterator[None]:
    """Around what reads or writes files that the user named in this option or argument: tells why it cannot."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise PegboardError(f"{option}: {error.filename}: {error.strerror}") from None


def check_writable(path: Path, option: str) -> None:
    """Raise PegboardError where no file can be written: before long work, and not after it."""
    folder = path.parent
    if path.is_dir():
        raise PegboardError(f"{option}: {path} is a directory")
    if not folder.is_dir():
        raise PegboardError(f"{option}: there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PegboardError(f"{option}: {path} cannot be written: permission denied")


def write_json(value: object) -> None:
    """Write a value as JSON, with escapes where standard output's encoding lacks a character."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    write(text)


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns on a terminal in its width; in a pipe as wide as they are, for grep and awk."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000
    table = Table(
        *head, box=SIMPLE_HEAD if console.is_terminal else None, padding=(0, 1), pad_edge=False, show_edge=False
    )
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    write("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))
