"""Room: makes place for new files by removing those that were used least recently."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pegboard.plugins.storage_files.index import on_disk

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.storage_files.folders import Folders, Place
    from pegboard.plugins.storage_files.index import Index
    from pegboard.plugins.storage_files.options import FilesOptions

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 20 * 10**9
DEFAULT_SHARE = 0.5
"""An unset `max_bytes`: so many, and at most this share of what is free."""
AT_ONCE = 0.05
"""Share of all bytes that goes at once, so that not each new file removes one."""
PAUSE, PAUSES = 0.005, 40
"""How often another server, which is removing files, is waited for, and how long each time, in seconds."""
PASSES = 3


class Room:
    """Keeps the folder within its bounds. Of several servers one removes files at a time. `scanned` is set once the
    index knows what the folder held at the start.
    """

    def __init__(self, options: FilesOptions, folders: Folders, index: Index, clock: Clock) -> None:
        self._options, self._folders, self._index, self._clock = options, folders, index, clock
        self._lock = threading.Lock()
        self.scanned = threading.Event()
        self.evicted = 0
        self.limit = 0
        self.measure()

    def measure(self) -> None:
        """Find out how many bytes all files may take together."""
        if self._options.max_bytes is not None:
            self.limit = self._options.max_bytes
            return
        free, _ = self._folders.free()
        self.limit = min(DEFAULT_BYTES, int((free + self._index.total) * DEFAULT_SHARE))

    def make(self, size: int, deadline: float) -> bool:
        """Return whether there is room for a file of so many bytes, or is now. Raises OSError."""
        size = on_disk(size)
        if self._lacking(size) <= 0:
            return True
        if not self._scanned(deadline):
            return False
        with self._alone(deadline) as mine:
            for _ in range(PASSES if mine else 0):
                lacking = self._lacking(size)
                if lacking <= 0:
                    break
                self._remove(lacking + int(self._index.total * AT_ONCE), deadline)
        return self._lacking(size) <= 0

    def make_more(self, size: int, deadline: float) -> None:
        """Remove files although there seems to be room: the file system has said that it is full."""
        if self._scanned(deadline):
            with self._alone(deadline) as mine:
                if mine:
                    self._remove(max(2 * on_disk(size), int(self._index.total * AT_ONCE)), deadline)

    def _lacking(self, size: int) -> int:
        over = self._index.total + size - self.limit
        free, whole = self._folders.free()
        return max(over, int(whole * self._options.min_free) + size - free)

    def _scanned(self, deadline: float) -> bool:
        """Wait until it is known what there is to remove."""
        while not self.scanned.wait(PAUSE):
            if self._clock() >= deadline:
                return False
        return True

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[bool]:
        """Be the only one that removes files, of all threads and servers. Yield False where another does not end."""
        # The lock is the folder's own: a file for it could not be made where the disk is full.
        with self._lock, self._folders.entered((".",)) as root:
            yield self._locked(root, deadline)

    def _locked(self, folder: int, deadline: float) -> bool:
        for _ in range(PAUSES):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() >= deadline:
                    return False
                time.sleep(PAUSE)
            except OSError:  # a file system without locks: two may remove more than one would
                return True
            else:
                return True
        return False

    def _remove(self, wanted: int, deadline: float) -> None:
        """Remove the files that were used least recently, about as many bytes as wanted."""
        while wanted > 0 and self._clock() < deadline:
            oldest = self._index.oldest()
            if oldest is None:
                return
            place, size, used = oldest
            if not self._used_since(place, size, used) and self._removed(place):
                wanted -= size

    def _used_since(self, place: Place, size: int, used: float) -> bool:
        """Return whether another server has used a file, or written it again: it is not the oldest, then."""
        about = self._folders.stat(place)
        if about is None or about.st_mtime <= used + 1.0:
            return False
        self._index.use(place, size, about.st_mtime)
        return True

    def _removed(self, place: Place) -> bool:
        """Return whether a file has been removed, here or elsewhere; one that cannot be is not tried again."""
        try:
            self.evicted += self._folders.remove(place)
        except OSError as error:
            logger.warning("the block %s cannot be removed: %s", place.name, error.strerror)
            self._index.leave(place)
            return False
        self._index.drop(place)
        return True
