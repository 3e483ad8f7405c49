"""Sources: the bytes of an item, from wherever a request says that they are, into a file of the store."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend.data_urls import PIECE, carried, check_head
from pegboard.plugins.media.frontend.fetch import MAX_URL, too_large
from pegboard.plugins.media.frontend.store import disk_full

if TYPE_CHECKING:
    from pegboard.plugins.media.frontend.fetch import Fetcher
    from pegboard.plugins.media.frontend.store import MediaFile
    from pegboard.toolkit.media.inputs import MediaInput

NOT_ALLOWED = "media_source_not_allowed"
RAW = "bytes"
REMOTE = ("http:", "https:")
LOCAL = (RAW, "data:", "file:")
_NOT_READ = (
    "this file cannot be read, or is not below one of the directories that requests may name (media.allowed_paths)"
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where media may come from: items of at most `max_bytes`, from servers with a `fetcher`, from files below the
    `directories`. Thread-safe.
    """

    max_bytes: int
    fetcher: Fetcher | None = None
    directories: tuple[str, ...] = ()

    def check(self, media: MediaInput) -> None:
        """Raise InvalidRequest for an item that is refused without reading it. Takes some microseconds."""
        if bool(media.url) == bool(media.data):
            raise InvalidRequest("an item has either an address or data", code="invalid_media_address")
        scheme = _scheme(media)
        # In an address, three bytes take four characters, and any more where they are escaped.
        if len(media.data) > self.max_bytes or (scheme == "data:" and len(media.url) > 4 * self.max_bytes):
            raise too_large(self.max_bytes)
        if scheme == "data:":
            check_head(media.url)
        elif scheme in REMOTE:
            if self.fetcher is None:
                text = "this server fetches no media; send them as data: addresses (media.fetch allows it)"
                raise InvalidRequest(text, code=NOT_ALLOWED)
            self.fetcher.check(media.url)
        elif scheme == "file:" and not self.directories:
            raise InvalidRequest("this server reads no files of its own (media.allowed_paths)", code=NOT_ALLOWED)
        elif scheme not in LOCAL:
            text = "an address must begin with data:, http:, https: or file:"
            raise InvalidRequest(text, code="invalid_media_address")

    def is_remote(self, media: MediaInput) -> bool:
        """Return whether receiving it means to wait for another machine."""
        return _scheme(media) in REMOTE

    def receive(self, media: MediaInput, file: MediaFile) -> bytes:
        """Write the bytes of an item that `check` lets pass into a file; their digest. Blocks.

        Raises InvalidRequest for what cannot be had, is too large, or finds no room (503), and Gone where the file was
        dropped meanwhile.
        """
        with _Receiving(file, self.max_bytes) as into:
            if _scheme(media) in REMOTE:
                assert self.fetcher is not None, "check() was not asked"
                self.fetcher.fetch(media.url, into.add)
            else:
                for piece in self._pieces(media):
                    into.add(piece)
            return into.digest()

    def _pieces(self, media: MediaInput) -> Iterator[bytes]:
        scheme = _scheme(media)
        if scheme == "data:":
            yield from carried(media.url)
        elif scheme == "file:":
            yield from self._read(media.url)
        else:
            view = memoryview(media.data)
            yield from (bytes(view[at : at + PIECE]) for at in range(0, len(view), PIECE))

    def _read(self, url: str) -> Iterator[bytes]:
        try:
            file = open_below(_path(url), self.directories)
        except OSError:
            raise InvalidRequest(_NOT_READ, code=NOT_ALLOWED) from None
        with contextlib.closing(os.fdopen(file, "rb")) as stream:
            while piece := stream.read(PIECE):
                yield piece


class _Receiving:
    """A file that is being received."""

    def __init__(self, file: MediaFile, most: int) -> None:
        self._file = file
        self._most = most
        self._size = 0
        self._hash = hashlib.blake2b(digest_size=32)
        self._out = -1

    def __enter__(self) -> _Receiving:
        with _disk(self._file):
            self._out = os.open(self._file.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._most:
            raise too_large(self._most)
        # Else the event loop would wait for 5 ms whenever it needs the interpreter's lock.
        time.sleep(0)
        self._file.take(len(piece))
        self._hash.update(piece)
        left = memoryview(piece)
        with _disk(self._file):
            while left:
                left = left[os.write(self._out, left) :]

    def digest(self) -> bytes:
        if not self._size:
            raise InvalidRequest("there is nothing in it", code="invalid_media")
        return self._hash.digest()


@contextlib.contextmanager
def _disk(file: MediaFile) -> Iterator[None]:
    """Around what writes a file: an error is the disk's, unless the file was dropped."""
    try:
        yield
    except OSError as error:
        file.take(0)
        raise disk_full(error) from error


def open_below(path: str, directories: Sequence[str]) -> int:
    """Return an open file, for reading, that lies below one of the directories when all links are followed. Only
    regular files. Raises OSError.

    Its way is walked again without following any link, so that one that is put there meanwhile leads nowhere.
    """
    real = Path(os.path.realpath(path, strict=True))
    roots = [Path(os.path.realpath(one)) for one in directories]
    root = next((one for one in roots if real != one and real.is_relative_to(one)), None)
    if root is None:
        raise PermissionError(path)
    *folders, name = real.relative_to(root).parts
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    here = os.open(root, flags | os.O_DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, flags | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        # Opening some devices does something.
        _check_regular(os.stat(name, dir_fd=here, follow_symlinks=False), path)
        file = os.open(name, flags, dir_fd=here)
    finally:
        os.close(here)
    try:
        _check_regular(os.fstat(file), path)
    except OSError:
        os.close(file)
        raise
    return file


def _check_regular(about: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise PermissionError(path)


def _scheme(media: MediaInput) -> str:
    """Return what an item's address begins with, in lower case; RAW for one that is its bytes."""
    head, colon, _ = media.url[:8].partition(":")
    return RAW if media.data else head.lower() + colon


def _path(url: str) -> str:
    """Return the path that a file: address names. Raises OSError for one that names none on this machine."""
    try:
        parts = urlsplit(url if len(url) <= MAX_URL else "")
        path = unquote(parts.path, errors="strict")
    except ValueError as error:
        raise FileNotFoundError(str(error)) from None
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise FileNotFoundError(path)
    return path
