"""Scratch folders, shared by the processes of one engine: made by one of them, and removed with it, or by another one
after its death.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "pegboard-scratch-"
_SHARED_MEMORY = Path("/dev/shm")


def new_directory() -> Path:
    """Return the name of a folder, which its owner makes (`make_locked`). Not in shared memory, which is small in
    containers.
    """
    parent = Path(tempfile.gettempdir())
    if parent.resolve().is_relative_to(_SHARED_MEMORY):
        parent = Path("/var/tmp")
    return parent / f"{PREFIX}{secrets.token_hex(8)}"


def remove_directory(directory: Path, patience: float = 2.0) -> None:
    """Remove a folder once its owner has died, for a process that only knows its name. Other folders are left
    alone, and that of an owner that lives on. A helper of that owner may write for some moments more.
    """
    if not directory.name.startswith(PREFIX):
        return
    deadline = time.monotonic() + patience
    while directory.exists():
        with contextlib.suppress(OSError):
            if _is_dead(directory):
                shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def make_locked(directory: Path) -> int:
    """Make a folder, and return its open file, which is locked for as long as this process lives. Raises OSError. The
    folder is never seen unlocked before that: it has another name until then.
    """
    if directory.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    scratch = directory.with_name(f".{directory.name}")
    scratch.mkdir(mode=0o700)
    lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        scratch.rename(directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def remove_dead(parent: Path) -> None:
    """Remove the folders whose owners have died."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = directory.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and _is_dead(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_dead(directory: Path) -> bool:
    """Return whether no process has the folder locked. Raises OSError."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
