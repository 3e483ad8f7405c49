"""Last words: a process that has to end says why, to the process that watches it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_file: Path | None = None


def keep_last_words(file: Path | None) -> None:
    """Write them into this file from now on; None: this process does not end itself."""
    global _file
    _file = file


def say_last_words(reason: str) -> None:
    """Leave the reason why this process is going to end, whatever ends it first; do nothing where it does not end
    itself.
    """
    if _file is not None:
        with contextlib.suppress(OSError):
            _file.write_text(reason, encoding="utf-8")


def end_process(reason: str) -> None:
    """End this process now, whatever its threads do, and leave the reason; return where it does not end itself."""
    if _file is not None:
        say_last_words(reason)
        os._exit(1)
