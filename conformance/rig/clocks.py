"""Notes who asks the machine for the time, where time is that of a context's clock."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_CLOCKS = frozenset(
    getattr(time, name + suffix) for name in ("time", "monotonic", "perf_counter") for suffix in ("", "_ns")
)
_DATES = frozenset({"datetime.now", "datetime.utcnow"})
_OTHERS = ("pegboard.conformance.", "pegboard.core.", "hypothesis.")
"""Modules whose calls do not count. Hypothesis times each collection of garbage, in whichever call one happens."""
_LIBRARY = str(Path(os.__file__).parent)


class ClockWatch:
    """Collects calls that ask for the time, by name; those of libraries and of the suites do not count."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what this thread calls meanwhile."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not _asks(called):
            return
        name, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if not name.startswith((_LIBRARY, "<")) and not module.startswith(_OTHERS):
            of = called.__qualname__ if called.__qualname__ in _DATES else f"time.{called.__name__}"
            self.found.add(f"{of} ({Path(name).name}:{frame.f_lineno})")


def _asks(called: Any) -> bool:
    try:
        return called in _CLOCKS or getattr(called, "__qualname__", "") in _DATES
    except TypeError:  # of what cannot be hashed
        return False
