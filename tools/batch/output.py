"""The output of `pegboard generate --file`: a line per answer, written at once, and read again to resume.

A run may end at any moment, by a signal or a power cut: what is in the file is then whole lines, but for the last one
perhaps, which the next run drops.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from pegboard.core.interfaces.errors import PegboardError

Mode = Literal["new", "resume", "overwrite"]

_LINE_BREAKS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}
"""What some readers end lines at, although JSON does not."""


class Output:
    """The file. `done` has, by the index of their lines, the digests of requests that are answered in it already."""

    def __init__(self, path: Path, mode: Mode, *, retry_failed: bool = False) -> None:
        """Open and lock it, and read what is there; nothing is changed yet. Raises PegboardError where it holds
        something for which no option says what to do, or that is not this command's, or where another run writes to it.
        """
        self.name = "stdout" if str(path) == "-" else str(path)
        self.done: dict[int, str] = {}
        self.failed = 0
        """How many of `done` are errors."""
        self._path = path
        self._mode = mode
        self._retry_failed = retry_failed
        self._keep = 0
        self._drop_failed = False
        self._stream: IO[bytes] = self._open()
        self.is_file = self.name != "stdout" and stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        """Whether it stays: a pipe does not, and cannot be resumed."""
        try:
            if self.is_file:
                self._look()
        except BaseException:
            self._stream.close()
            raise

    def begin(self) -> None:
        """Make it ready to be written to: empty, or without what is half-written at its end."""
        if not self.is_file:
            return
        if self._drop_failed:
            self._rewrite()
        with self._guarded():
            self._stream.truncate(0 if self._mode == "overwrite" else self._keep)
            self._stream.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Write a line, which has left this process when this returns. Raises PegboardError where it cannot be
        written.
        """
        text = json.dumps(record, ensure_ascii=False).translate(_LINE_BREAKS)
        with self._guarded():
            self._stream.write(text.encode("utf-8", "backslashreplace") + b"\n")
            self._stream.flush()

    def close(self) -> None:
        """Have it on disk."""
        if self._stream.closed:
            return
        with self._guarded():
            self._stream.flush()
            with contextlib.suppress(OSError):
                # Not everything that can be written to can be synchronised.
                os.fsync(self._stream.fileno())
        if self.name != "stdout":
            self._stream.close()

    def _open(self) -> IO[bytes]:
        if self.name == "stdout":
            return sys.stdout.buffer
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise PegboardError(f"--output: {self._path} cannot be written: {error.strerror}") from None

    def _look(self) -> None:
        """Make sure that it may be written to, and find out what is in it."""
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PegboardError(f"--output: another run is writing to {self._path}") from None
        if self._mode == "resume":
            self._scan()
        elif self._mode == "new" and os.fstat(self._stream.fileno()).st_size:
            raise PegboardError(
                f"--output: {self._path} has answers already; --resume goes on with it, --overwrite starts anew"
            )

    def _scan(self) -> None:
        with self._path.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if not raw.endswith(b"\n"):
                    return
                record = self._record(raw, number)
                self._keep += len(raw)
                if record.error is not None:
                    if self._retry_failed:
                        self._drop_failed = True
                        continue
                    self.failed += 1
                self.done[record.index] = record.digest

    def _record(self, raw: bytes, number: int) -> _Known:
        try:
            return msgspec.json.decode(raw, type=_Known)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise PegboardError(
                f"--resume: {self._path}:{number} is not a line that this command writes; --overwrite starts anew"
            ) from None

    def _rewrite(self) -> None:
        """Leave errors out, in a new file that takes the place of the old one when it is complete."""
        path = self._path.with_name(self._path.name + ".new")
        with self._guarded():
            new = path.open("w+b", buffering=0)
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._path.open("rb") as lines:
                for number, raw in enumerate(lines, 1):
                    if raw.endswith(b"\n") and self._record(raw, number).error is None:
                        new.write(raw)
            os.fsync(new.fileno())
            path.replace(self._path)
            self._stream.close()
            self._stream, self._keep = new, new.tell()

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise PegboardError(
                f"--output: {self.name} cannot be written: {error.strerror}; what is complete in it stays, and "
                "--resume goes on after it"
            ) from None


class _Known(msgspec.Struct):
    """What of a line matters when a run is resumed."""

    index: int
    digest: str
    error: Any = None
