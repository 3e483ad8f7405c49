"""Folders: opens what is below one folder step by step, so that no link leads elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEX = re.compile(r"[0-9a-f]+")
NAME = re.compile(r"(?:[0-9a-f]{2}){32,64}")
"""Of a block's file: its key."""
TEMPORARY = re.compile(r"\.new-[0-9a-f]{16}")
OURS = re.compile(f"{NAME.pattern}|{TEMPORARY.pattern}")
STALE = 3600.0
"""Seconds after which a temporary file is what a crash has left."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in a block's place must not hang
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block is: `<identity>/<ab>/<cd>/<name>`, where the name is its key in hexadecimal, abcd…"""

    identity: str
    name: str

    @property
    def folders(self) -> tuple[str, str, str]:
        return self.identity, self.name[:2], self.name[2:4]


@dataclass(frozen=True, slots=True)
class Found:
    """A file that a walk has met: its size, and when it was last used, in seconds since 1970."""

    place: Place
    size: int
    used: float


class Folders:
    """The files below `root`. The root itself may be reached through links; nothing below it is. Methods raise OSError.

    Several threads may use it. `root` is made at first, and not again: it may be a mount that is away.
    """

    def __init__(self, root: Path, fsync: bool = False) -> None:
        self.root = root
        self._fsync = fsync
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._old: list[int] = []
        self._reopening = threading.Lock()

    def close(self) -> None:
        for fd in (self._root, *self._old):
            os.close(fd)

    @contextlib.contextmanager
    def entered(self, names: Sequence[str], create: bool = False) -> Iterator[int]:
        """Open a folder below the root, for the block's length; with `create` make what is missing."""
        fd, opened = self._root, list[int]()
        try:
            for name in names:
                fd = _enter(name, fd, create)
                opened.append(fd)
            yield fd
        finally:
            for one in opened:
                os.close(one)

    def reopen(self) -> None:
        """Take the folder that stands under the root's name by now. Raises FileNotFoundError where there is none."""
        with self._reopening:
            now, before = self.root.stat(), os.fstat(self._root)
            if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
                self._old.append(self._root)  # a thread may be using it
                self._root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def free(self) -> tuple[int, int]:
        """Return the bytes that are free for this user, and those of the whole file system."""
        found = os.fstatvfs(self._root)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def stat(self, place: Place) -> os.stat_result | None:
        """Return what stands in a block's place. Nothing is opened, so it may see more than `read` does."""
        path = "/".join((*place.folders, place.name))
        try:
            return os.stat(path, dir_fd=self._root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextlib.contextmanager
    def reading(self, place: Place) -> Iterator[int]:
        """Open a block's file to read from. Raises FileNotFoundError where there is none."""
        with self.entered(place.folders) as folder:
            file = os.open(place.name, _READ, dir_fd=folder)
        try:
            yield file
        finally:
            os.close(file)

    def write(self, place: Place, parts: Sequence[memoryview], late: Callable[[], bool]) -> bool:
        """Let a file with these bytes appear all at once, instead of what may be there. Return False if it is `late`
        before that. Raises FileNotFoundError where the root is gone, and NotADirectoryError or IsADirectoryError where
        something stands in its way that cannot be removed.
        """
        cleared = False
        while True:
            try:
                with self.entered(place.folders, create=True) as folder:
                    self._write(place.name, folder, parts)
                return True
            except FileNotFoundError:
                # Another server has removed a folder, which was empty, just before a file was made in it, or the
                # temporary file, which it took for a leftover. Each new try follows on something that another has done.
                self.reopen()
            except (NotADirectoryError, IsADirectoryError):
                if cleared:
                    raise
                cleared = True
                self._clear(place)
            except OSError:
                self._remove_empty(place.folders)
                raise
            if late():
                return False

    def _write(self, name: str, folder: int, parts: Sequence[memoryview]) -> None:
        temporary = f".new-{os.urandom(8).hex()}"
        file = os.open(temporary, _CREATE, 0o600, dir_fd=folder)
        try:
            try:
                write_all(file, parts)
                if self._fsync:
                    os.fsync(file)
            finally:
                os.close(file)  # where some file systems say that they are full
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if self._fsync:
            os.fsync(folder)

    def remove(self, place: Place) -> bool:
        """Remove a file, or what stands in its way, and the folders that are empty then. Return False where there was
        nothing.
        """
        try:
            with self.entered(place.folders) as folder:
                _unlink(place.name, folder)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            self._clear(place)
        self._remove_empty(place.folders)
        return True

    def remove_all(self, identity: str) -> list[OSError]:
        """Remove the blocks of an identity, and what crashes have left. Return what went wrong. Temporary files that
        are being written stay: their blocks are written after this.
        """
        errors: list[OSError] = []
        for first in self._names((identity,), HEX):
            for second in self._names((identity, first), HEX):
                folders = (identity, first, second)
                with contextlib.suppress(OSError), self.entered(folders) as folder:
                    for name in self._names(folders, OURS):
                        try:
                            if NAME.fullmatch(name) or self._left(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                                _unlink(name, folder)
                        except FileNotFoundError:
                            pass
                        except OSError as error:
                            errors.append(error)
                self._remove_empty(folders)
        return errors

    def walk(self, stop: Callable[[], bool]) -> Iterator[Found]:
        """Yield all blocks of all identities, and remove temporary files that are older than an hour. What cannot be
        read is passed over.
        """
        for identity in self._names((), HEX):
            for first in self._names((identity,), HEX):
                for second in self._names((identity, first), HEX):
                    if stop():
                        return
                    yield from self._leaf((identity, first, second))

    def _remove_empty(self, folders: Sequence[str]) -> None:
        """Remove folders, the innermost first, as long as they are empty."""
        with contextlib.suppress(OSError):
            for depth in reversed(range(len(folders))):
                with self.entered(folders[:depth]) as folder:
                    os.rmdir(folders[depth], dir_fd=folder)

    def _names(self, folders: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
        try:
            with self.entered(folders) as folder, os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if pattern.fullmatch(entry.name))
        except OSError:
            return []

    def _leaf(self, folders: tuple[str, str, str]) -> list[Found]:
        found = []
        with contextlib.suppress(OSError), self.entered(folders) as folder:
            for name in self._names(folders, OURS):
                with contextlib.suppress(OSError):
                    about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if not stat.S_ISREG(about.st_mode):
                        continue
                    if NAME.fullmatch(name):
                        found.append(Found(Place(folders[0], name), about.st_size, about.st_mtime))
                    elif self._left(about):
                        os.unlink(name, dir_fd=folder)
        return found

    def _left(self, temporary: os.stat_result) -> bool:
        """Return whether a temporary file is what a crash has left. The file system's own clock says so, which may be
        another machine's.
        """
        os.utime(self._root)
        return os.fstat(self._root).st_mtime - temporary.st_mtime > STALE

    def _clear(self, place: Place) -> None:
        """Remove what stands where a block's folders belong and is not one, and a folder in the file's place. What
        belongs there stays, also if another server has just put it there.
        """
        with contextlib.suppress(OSError):
            for depth, name in enumerate(place.folders):
                with self.entered(place.folders[:depth]) as above, contextlib.suppress(IsADirectoryError):
                    os.unlink(name, dir_fd=above)
            with self.entered(place.folders) as folder:
                _move_away(place.name, folder)


def write_all(file: int, parts: Sequence[memoryview]) -> None:
    """Write all bytes, however many each call takes."""
    left = [part.cast("B") for part in parts]
    while left:
        _skip(left, os.writev(file, left))


def read_all(file: int, parts: Sequence[memoryview]) -> bool:
    """Fill all buffers from the file's beginning. Return False where it ends before."""
    left, offset = [part.cast("B") for part in parts], 0
    while left:
        done = os.preadv(file, left, offset)
        if not done:
            return False
        offset += done
        _skip(left, done)
    return True


def _skip(parts: list[memoryview], done: int) -> None:
    while parts and done >= len(parts[0]):
        done -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][done:]


def _unlink(name: str, folder: int) -> None:
    """Remove a file, or a folder that stands in its place."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        _move_away(name, folder)


def _move_away(name: str, folder: int) -> None:
    """Remove a folder. If there is something in it, it gets another name, and nothing is lost. A file stays."""
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # With the slash the call refuses what is not a folder.
        os.rename(f"{name}/", f".bad-{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=folder)


def _enter(name: str, folder: int, create: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)
