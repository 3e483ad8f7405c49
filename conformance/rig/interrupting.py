"""Two calls at once, in an order that a test chooses: one runs in between two lines of the other.

It depends on no luck: whichever way threads may take turns between lines is tried, one after the other. Where the call
in between waits for the other one (a lock), that one goes on, so code that locks is right, and code that does not is
seen in each of its states.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HANGS = 60.0
"""Seconds after which calls count as waiting for each other."""

_LOOKS = 3
"""A thread that sleeps in the same place so many times in a row waits for something."""

_LIBRARY = str(Path(os.__file__).parent)
_OURS = ("pegboard.core.", __name__)
_SUITE = ".suite."
"""Within the name of a module of a plugin's suite."""


class _Call:
    """Runs in a thread of its own, and keeps what it raises."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.raised = error

    def end(self) -> None:
        """Wait for it. Raises what it has raised."""
        self.thread.join(HANGS)
        waits = self.thread.is_alive()
        assert not waits, (
            f"a call has not ended after {HANGS:g} s: does it wait for a lock that an earlier call has left locked, or "
            "that a call at the same time holds, which waits for it?"
        )
        if self.raised is not None:
            raise self.raised

    def wait_until_it_waits(self) -> None:
        """Return when it has ended, or waits for what it cannot get now."""
        looks, place = 0, None
        for _ in range(2000):
            self.thread.join(0.0005)
            frame = sys._current_frames().get(self.thread.ident or 0)
            if frame is None:
                return
            here = (frame.f_code, frame.f_lasti)
            looks = looks + 1 if here == place and _sleeps(self.thread) else 0
            place = here
            if looks == _LOOKS:
                return


def ended(call: Callable[[], object]) -> None:
    """Run `call` in a thread of its own. Fail where it does not end. Raises what it raises."""
    one = _Call(call)
    one.thread.start()
    one.end()


def _sleeps(thread: threading.Thread) -> bool:
    """Return whether the system has nothing to run of a thread. Where it does not tell, a thread counts as asleep."""
    try:
        about = Path(f"/proc/self/task/{thread.native_id}/stat").read_text("ascii")
    except OSError:
        return True
    return about.rpartition(")")[2].split()[0] in "SD"


def interrupted(call: Callable[[], object], between: Callable[[], object], at: int) -> int:
    """Run `call`, and `between` before its line number `at`, from 0, or after it where it has fewer lines this time,
    each in a thread. Return the lines of `call`; those of the standard library and of Pegboard do not count. Raises
    what either raises.
    """
    lines, other = 0, _Call(between)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if not _is_the_authors(frame):
            return None
        if event == "line":
            if lines == at:
                other.thread.start()
                other.wait_until_it_waits()
            lines += 1
        return trace

    def traced() -> None:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)

    first = _Call(traced)
    first.thread.start()
    first.end()
    if at >= lines:
        other.thread.start()
    other.end()
    return lines


def _is_the_authors(frame: FrameType) -> bool:
    name, module = frame.f_code.co_filename, f"{frame.f_globals.get('__name__')}"
    if name.startswith("<") or module.startswith(_OURS) or _SUITE in module:
        return False
    return not name.startswith(_LIBRARY) or "site-packages" in name
