"""FilesStorage: a file per block."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext, StorageError
from pegboard.plugins.storage_files.folders import HEX, Folders, Place, read_all
from pegboard.plugins.storage_files.index import Index, on_disk
from pegboard.plugins.storage_files.options import FilesOptions
from pegboard.plugins.storage_files.room import AT_ONCE, Room
from pegboard.toolkit.cache.block_frames import BlockFrames
from pegboard.toolkit.system.cache_dir import cache_path, default_cache_dir

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
UNREADABLE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EIO)
"""A link, a folder, a file in a folder's place, a socket, a bad sector: whatever it is, it is not a block."""
CLOSE_SECONDS = 5.0
"""How long `close` waits for a search of the folder."""
TOUCHED = 3600.0
"""Seconds for which a file's time may be older than its last use."""


class FilesStorage(KVStorage[FilesOptions]):
    """Blocks at `<dir>/<identity>/<ab>/<cd>/<key in hexadecimal>`, each with the header of BlockFrames before it.

    A file is written under a temporary name and renamed, so it is there at once, and as a whole. Which files there are
    is asked of the file system each time, since other servers write and remove them too; the index only says which were
    used least recently. A thread fills it at the start, and again from time to time.
    """

    def __init__(self, options: FilesOptions, ctx: KVStorageContext) -> None:
        super().__init__(options, ctx)
        if not HEX.fullmatch(ctx.identity):
            raise ValueError(f"an identity is hexadecimal, got {ctx.identity!r}")
        self._frames = BlockFrames(ctx.identity, ctx.block_bytes)
        self._size = self._frames.frame_bytes
        self._dir = _folder(options)
        with self._telling("use", "it cannot be made here; name another one in `dir`"):
            self._folders = Folders(self._dir, options.fsync)
            self._index = Index()
            self._room = Room(options, self._folders, self._index, ctx.clock)
        self._damaged = self._dropped = self._written = self._scans = 0
        self._closing, self._due = threading.Event(), threading.Event()
        self._scanner = threading.Thread(target=self._scan, name="pegboard-files", daemon=True)
        self._scanner.start()
        logger.info("KV blocks in %s: at most %.1f GB", self._dir, self._room.limit / 1e9)

    @classmethod
    def supports(cls, options: FilesOptions, ctx: KVStorageContext) -> str | None:
        if options.max_bytes is not None and options.max_bytes < on_disk(ctx.block_bytes + BlockFrames.header_bytes):
            need = on_disk(ctx.block_bytes + BlockFrames.header_bytes)
            return f"max_bytes of {options.max_bytes} is less than one block takes; make it at least {need}"
        return _unusable(_folder(options)) or _unusable_below(_folder(options), ctx.identity)

    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        with self._telling("look into"):
            for count, key in enumerate(keys):
                if self._late(deadline) or not self._there(self._place(key)):
                    return count
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        with self._telling("read from"):
            for count, (key, out) in enumerate(zip(keys, into, strict=True)):
                if self._late(deadline) or not self._read(key, out):
                    return count
        return len(keys)

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        with self._telling("write to"):
            for count, (key, block) in enumerate(zip(keys, blocks, strict=True)):
                if self._late(deadline) or not self._write(key, block, deadline):
                    return count
        return len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._telling("remove from"):
            for place in map(self._place, keys):
                self._folders.remove(place)
                self._index.drop(place)

    def clear(self) -> None:
        with self._telling("remove from"):
            errors = self._folders.remove_all(self.ctx.identity)
            self._index.drop_all(self.ctx.identity)
            if errors:
                raise errors[0]

    def stats(self) -> Mapping[str, float]:
        return {
            "blocks": len(self._index),
            "bytes": self._index.total,
            "limit_bytes": self._room.limit,
            "evicted": self._room.evicted,
            "damaged": self._damaged,
            "dropped": self._dropped,
            "stuck": self._index.stuck,
            "scans": self._scans,
        }

    def close(self) -> None:
        self._closing.set()
        self._due.set()
        self._scanner.join(CLOSE_SECONDS)
        if self._scanner.is_alive():  # a mount that is away: the call cannot be ended, and needs the folders
            logger.warning("%s does not answer; its search is left behind", self._dir)
            return
        self._folders.close()

    def _late(self, deadline: float) -> bool:
        return self.ctx.clock() >= deadline

    def _place(self, key: bytes) -> Place:
        return Place(self.ctx.identity, key.hex())

    @contextlib.contextmanager
    def _telling(self, what: str, gone: str = "it is gone; make the folder again") -> Iterator[None]:
        """Turn what the system says into an error that names the folder; `gone` is said where that is not there."""
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(f"cannot {what} {self._dir}: {gone}") from error
        except OSError as error:
            raise StorageError(f"cannot {what} {self._dir}: {error.strerror or error}") from error

    def _there(self, place: Place) -> bool:
        about = self._folders.stat(place)
        return about is not None and stat.S_ISREG(about.st_mode) and about.st_size == self._size

    def _read(self, key: bytes, out: memoryview) -> bool:
        """Read a block; return False where it is not there, or not as it was written."""
        place = self._place(key)
        try:
            with self._folders.reading(place) as file:
                about = os.fstat(file)
                whole = stat.S_ISREG(about.st_mode) and about.st_size == self._size
                header = bytearray(self._frames.header_bytes)
                whole = whole and read_all(file, [memoryview(header), out]) and self._frames.fits(header, key, out)
                if whole and time.time() - about.st_mtime > TOUCHED:
                    with contextlib.suppress(OSError):
                        os.utime(file)
        except FileNotFoundError:
            self._index.drop(place)
            return False
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            whole = False
        if whole:
            self._index.use(place, self._size)
        else:
            self._damaged += 1
            level = logging.WARNING if self._damaged == 1 else logging.DEBUG
            logger.log(level, "a damaged block is removed: %s in %s", place.name, self._dir)
            with contextlib.suppress(OSError):  # it is a miss as long as it stays
                self._folders.remove(place)
                self._index.drop(place)
        return whole

    def _write(self, key: bytes, block: memoryview, deadline: float) -> bool:
        """Write a block; return False where there is no room or time for it, or something stands in its place that
        cannot be removed.
        """
        place = self._place(key)
        if self._there(place):
            self._index.use(place, self._size)
            return True
        if not self._room.make(self._size, deadline):
            self._dropped += 1
            return False
        parts = [memoryview(self._frames.header(key, block)), block]
        try:
            written = self._put(place, parts, deadline)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._room.make_more(self._size, deadline)
            written = self._put(place, parts, deadline)
        if not written:
            self._dropped += 1
            return False
        self._index.use(place, self._size)
        self._written += on_disk(self._size)
        if self._written > self._room.limit * AT_ONCE:
            self._due.set()
        return True

    def _put(self, place: Place, parts: Sequence[memoryview], deadline: float) -> bool:
        try:
            return self._folders.write(place, parts, lambda: self._late(deadline))
        except (NotADirectoryError, IsADirectoryError) as error:
            logger.warning("the block %s in %s cannot be written: %s", place.name, self._dir, error.strerror)
            return False

    def _scan(self) -> None:
        """Run in a thread: learn what there is, at the start, and again where other servers may have changed it."""
        while not self._closing.is_set():
            self._written = 0
            try:
                self._index.begin()
                self._index.merge(self._folders.walk(self._closing.is_set))
                if not self._room.scanned.is_set():
                    self._room.measure()
            except Exception:
                logger.exception("the folder %s could not be searched", self._dir)
            self._scans += 1
            self._room.scanned.set()
            while not self._closing.is_set():
                self._due.wait(self.options.rescan)
                self._due.clear()
                if self._written:
                    break


def _folder(options: FilesOptions) -> Path:
    return cache_path(options.dir) if options.dir else default_cache_dir() / "kv"


def _unusable(folder: Path) -> str | None:
    """Return why a folder cannot be used, or made."""
    if folder.is_dir():
        if os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            return None
        return (
            f"the folder {folder} cannot be read and written: it is read-only, or belongs to another user; give it to "
            f"the user {os.geteuid()} with mode 700, or name another one in `dir`"
        )
    if os.path.lexists(folder):
        return f"{folder} is not a folder; name another one in `dir`"
    above = next(one for one in folder.absolute().parents if os.path.lexists(one))
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        return None
    return f"the folder {folder} does not exist and cannot be made in {above}; make it, or name another one in `dir`"


def _unusable_below(folder: Path, identity: str) -> str | None:
    """Return why the folder of an identity cannot be used."""
    below = folder / identity
    if not os.path.lexists(below):
        return None
    if below.is_symlink():
        return f"{below} is a link, which is not followed; remove it"
    return _unusable(below)
