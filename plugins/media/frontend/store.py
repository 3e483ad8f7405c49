"""MediaStore: the one owner of the files in which media wait, as they were received and as pixels.

The files lie in a folder of their own that only this user may enter, on disk. What one item takes there is small
against the number of items under way, so their bytes are counted, and bounded together. Each file knows how many still
need it; the last one to drop it removes it. The folder goes with the store, and one whose process has died at the next
start.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.toolkit.system.scratch import make_locked, remove_dead

logger = logging.getLogger(__name__)

LARGE = 4 * 2**20
"""Bytes of a file from which on removing it takes milliseconds, which no event loop should wait for."""
FULL = "media_store_full"


class Gone(Exception):
    """A file was dropped while it was being written: nothing waits for it any more."""


class StoreFull(InvalidRequest):
    """There is no room for a file just now."""


class MediaStore:
    """Files under way, of at most `most` bytes together. Thread-safe.

    Makes its folder, and removes those that dead processes left beside it. Raises PegboardError where it cannot.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self.directory = directory
        self._most = most
        self._mutex = threading.Lock()
        self._bytes = 0
        self._files: set[MediaFile] = set()
        self._number = 0
        self._closed = False
        self._remover = ThreadPoolExecutor(1, "media-remove")
        try:
            remove_dead(directory.parent)
            self._lock = make_locked(directory)
        except OSError as error:
            raise PegboardError(f"no folder for media can be made at {directory}: {error.strerror}") from error

    @property
    def bytes(self) -> int:
        """Bytes of all files, those that are promised included."""
        return self._bytes

    @property
    def files(self) -> int:
        return len(self._files)

    def holds_only(self, files: Collection[MediaFile]) -> bool:
        """Return whether no other files than these take any room."""
        with self._mutex:
            return self._bytes == sum(one.size for one in files)

    @property
    def most(self) -> int:
        """Bytes that all files may take together."""
        return self._most

    def create(self) -> MediaFile:
        """Return a new, empty file, which its caller drops. Raises InvalidRequest (503) where the disk has no room, or
        the store is closed.
        """
        with self._mutex:
            if self._closed:
                raise InvalidRequest("the server is shutting down, try another one", code="shutting_down", status=503)
            self._number += 1
            file = MediaFile(self, f"{self._number:x}-{secrets.token_hex(8)}")
            try:
                os.close(os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except OSError as error:
                raise disk_full(error) from error
            self._files.add(file)
        return file

    def close(self) -> None:
        """Remove everything. May be called twice; files that are dropped afterwards are gone already."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._files.clear()
            self._bytes = 0
        self._remover.shutdown()
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    # ---- for its files --------------------------------------------------------------------------------------------

    def take(self, file: MediaFile, size: int) -> None:
        """Count `size` bytes more for a file. Raises InvalidRequest (503) where there is no room for them, and Gone."""
        with self._mutex:
            if file not in self._files:
                raise Gone
            if self._bytes + size > self._most:
                raise full()
            self._count(file, size)

    def take_some(self, file: MediaFile, most: int) -> int:
        """Count `most` bytes for a file, or as many as there is room for; how many."""
        with self._mutex:
            size = max(0, min(most, self._most - self._bytes))
            self._count(file, size)
            return size

    def shrink(self, file: MediaFile, size: int) -> None:
        """Count `size` bytes for a file from now on."""
        with self._mutex:
            self._count(file, size - file.size)

    def change(self, file: MediaFile, users: int) -> None:
        """Note that so many more need a file, or fewer; remove one that is not needed any more."""
        with self._mutex:
            file.users += users
            if file.users > 0 or file not in self._files:
                return
            self._files.remove(file)
            size, file.size = file.size, 0
            self._bytes -= size
            if size > LARGE:
                self._remover.submit(_remove, file.path)
        if size <= LARGE:
            _remove(file.path)

    def _count(self, file: MediaFile, size: int) -> None:
        if file in self._files:
            file.size += size
            self._bytes += size


class MediaFile:
    """A file of a store. It is made for one user, and stays until all its users have dropped it."""

    def __init__(self, store: MediaStore, name: str) -> None:
        self._store = store
        self.name = name
        self.path = store.directory / name
        self.size = 0
        """Bytes that are counted for it."""
        self.users = 1

    def keep(self) -> None:
        """Note one more that needs it, and drops it in its turn."""
        self._store.change(self, 1)

    def drop(self) -> None:
        """Note that one does not need it any more; the last one removes it."""
        self._store.change(self, -1)

    def take(self, size: int) -> None:
        """As of MediaStore."""
        self._store.take(self, size)

    def take_some(self, most: int) -> int:
        """As of MediaStore."""
        return self._store.take_some(self, most)

    def shrink(self, size: int) -> None:
        """As of MediaStore."""
        self._store.shrink(self, size)


def full() -> InvalidRequest:
    """Return the refusal of what there is no room for."""
    text = "the media of other requests take all the room that there is (media.max_bytes_in_flight); try again later"
    return StoreFull(text, code=FULL, status=503)


def disk_full(error: OSError) -> InvalidRequest:
    """Return the refusal of what could not be written; the log has the reason."""
    logger.error("media cannot be written: %s", error)
    return InvalidRequest("the server has no room for media at the moment; try again later", code=FULL, status=503)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        # It goes with the folder.
        logger.error("a file of media cannot be removed: %s", error)
