"""Index: which files there are, as far as this server knows, in the order of their use."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from pegboard.plugins.storage_files.folders import Found, Place

_UNIT = 4096


def on_disk(size: int) -> int:
    """Return about how many bytes a file of this size takes on a disk."""
    return -(-size // _UNIT) * _UNIT


class Index:
    """Sizes and times of files, the least recently used first; `total` is what they take. Several threads may use it.

    Other servers write and remove files too: a scan, from `begin` to `merge`, learns of that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[Place, tuple[int, float]] = OrderedDict()
        self._stuck: dict[Place, int] = {}
        self._since: dict[Place, tuple[int, float] | None] | None = None
        self._total = 0

    def __len__(self) -> int:
        return len(self._files) + len(self._stuck)

    @property
    def total(self) -> int:
        """Bytes of all files, those that cannot be removed among them."""
        return self._total

    @property
    def stuck(self) -> int:
        """How many files cannot be removed."""
        return len(self._stuck)

    def use(self, place: Place, size: int, used: float | None = None) -> None:
        """Note a file that was written or read: just now by default."""
        with self._lock:
            if place in self._stuck:
                return
            self._put(place, (on_disk(size), time.time() if used is None else used))

    def drop(self, place: Place) -> None:
        """Note that a file is gone."""
        with self._lock:
            self._total -= self._stuck.pop(place, 0)
            self._put(place, None)

    def drop_all(self, identity: str) -> None:
        """Note that all files of an identity are gone."""
        with self._lock:
            places = [place for place in (*self._files, *self._stuck) if place.identity == identity]
        for place in places:
            self.drop(place)

    def leave(self, place: Place) -> None:
        """Note that a file cannot be removed: it counts, and is never the oldest again."""
        with self._lock:
            known = self._files.pop(place, None)
            if known is not None:
                self._stuck[place] = known[0]

    def oldest(self) -> tuple[Place, int, float] | None:
        """Return the file that was used least recently, what it takes, and when that was."""
        with self._lock:
            for place, (size, used) in self._files.items():
                return place, size, used
        return None

    def begin(self) -> None:
        """Begin a scan: what is noted from now on is newer than what it finds."""
        with self._lock:
            self._since = {}

    def merge(self, found: Iterable[Found]) -> None:
        """End a scan: these are the files, but for what was noted meanwhile."""
        files = {one.place: (on_disk(one.size), one.used) for one in found}
        with self._lock:
            for place, (_, used) in self._files.items():
                if place in files and used > files[place][1]:
                    files[place] = files[place][0], used
            for place, entry in (self._since or {}).items():
                files.pop(place, None)
                if entry is not None:
                    files[place] = entry
            self._since = None
            self._stuck = {place: files.pop(place)[0] for place in self._stuck if place in files}
            self._files = OrderedDict(sorted(files.items(), key=lambda item: item[1][1]))
            self._total = sum(size for size, _ in files.values()) + sum(self._stuck.values())

    def _put(self, place: Place, entry: tuple[int, float] | None) -> None:
        before = self._files.pop(place, None)
        if before is not None:
            self._total -= before[0]
        if entry is not None:
            self._files[place] = entry
            self._total += entry[0]
        if self._since is not None:
            self._since[place] = entry
