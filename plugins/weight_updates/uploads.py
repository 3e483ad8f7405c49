"""Uploads: the file in which a body with new weights waits until it is written into the model."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.weight_updates.messages import NAME
from pegboard.toolkit.system.scratch import make_locked

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Uploads:
    """One file at a time, in `directory`, which only this user may enter. The directory is made and locked at the first
    upload, so that no other server takes it for that of a dead process, and removed at `close`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mutex = threading.Lock()
        self._lock: int | None = None
        self._busy = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[Path]:
        """Return the name of a new file, which is removed at the end. Raises InvalidRequest: 409 if there is another
        upload.
        """
        if self._busy:
            text = "another upload of weights is under way, or is being written into the model"
            raise InvalidRequest(text, code="update_under_way", status=409)
        self._busy = True
        file = self._directory / f"{NAME}-{uuid.uuid4().hex}.safetensors"
        try:
            yield file
        finally:
            self._busy = False
            file.unlink(missing_ok=True)

    async def keep(self, pieces: AsyncIterator[bytes], file: Path) -> None:
        """Write a body to a file as it comes. Raises InvalidRequest: 507 if there is no room for it."""
        try:
            self._make()
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(made, "wb") as stream:
                async for piece in pieces:
                    await asyncio.to_thread(stream.write, piece)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            text = f"the weights do not fit into {self._directory} ({error.strerror}); make room there, or set TMPDIR"
            raise InvalidRequest(text, code="no_room", status=507) from error

    def _make(self) -> None:
        """Make the directory. Raises OSError."""
        with self._mutex:
            if self._lock is None:
                # Another part of this process may have made it.
                with contextlib.suppress(FileExistsError):
                    self._lock = make_locked(self._directory)

    def close(self) -> None:
        """Remove the directory. May be called again."""
        with self._mutex:
            lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(lock)
