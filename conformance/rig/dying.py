"""Work in a process of its own that is then killed, as a crash or `kill -9` would end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

HANGS = 120.0
"""Seconds after which work that has not ended counts as hanging."""

_DONE = b"\0"


def work_and_die(work: Callable[[], object]) -> bool:
    """Run `work` in a copy of this process, which is killed when it returns: nothing is closed or flushed. What it
    raises fails the test here. Return whether it has returned; work may kill the process before.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        _run_in_the_child(work, writes)
    os.close(writes)
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        told = _read_until_it_ends(pipe.fileno())
        if told is None:
            os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert told is not None, f"in a process of its own it hangs: it has not ended after {HANGS:g} s"
    text = told.removesuffix(_DONE).decode(errors="replace")
    assert not text, f"in a process of its own it fails:\n{text}"
    return bool(told)


def die_after_change(number: int, folder: Path) -> None:
    """Kill this process once this thread has changed files below `folder` so many times, and once more: before it runs
    the next line, of a library or not.
    """
    changes, before = 0, state_of(folder)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal changes, before
        if event == "line" and (now := state_of(folder)) != before:
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            changes, before = changes + 1, now
        return trace

    sys.settrace(trace)


def state_of(folder: Path) -> Mapping[str, object]:
    """Return what there is below a folder: size and time of files, and names of folders."""
    found: dict[str, object] = {}
    todo = [str(folder)]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    found[entry.path] = "a folder"
                else:
                    about = entry.stat(follow_symlinks=False)
                    found[entry.path] = about.st_size, about.st_mtime_ns
    return found


def _run_in_the_child(work: Callable[[], object], writes: int) -> None:
    text = ""
    try:
        work()
    except BaseException:
        text = traceback.format_exc()
    finally:
        sys.settrace(None)
        with contextlib.suppress(OSError):
            os.write(writes, text.encode()[-60_000:] + _DONE)
        os.kill(os.getpid(), signal.SIGKILL)


def _read_until_it_ends(reads: int) -> bytes | None:
    """Return what the child writes; None where it neither ends nor writes."""
    told = b""
    while select.select([reads], [], [], HANGS)[0]:
        more = os.read(reads, 1 << 16)
        told += more
        if not more or told.endswith(_DONE):
            return told
    return None
