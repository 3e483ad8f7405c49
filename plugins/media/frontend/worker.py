"""A process that prepares media: ``python -P -m pegboard.plugins.media.frontend.worker PARENT``, started by a
pool of the API process.

What a client sent is decoded by libraries that have had their share of holes. Here they have no keys, little memory,
little time and nothing to write but one file that is there already. The first frame says what the process is to be,
each one after it brings an item.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import math
import mmap
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import EncodedStates, MediaContext, MediaLimits, MediaProcessor, MediaShape, MediaSource
from pegboard.plugins.media.frontend.encoded import copy_states
from pegboard.toolkit.media.inputs import EncodedForm, MediaKind, MediaSettings
from pegboard.toolkit.system.helper_child import computing, die_with_parent, limit, serve
from pegboard.toolkit.system.log_lines import LimitedLog

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)
_log = LimitedLog(logger, most=5, seconds=60.0)

VERSION = b"pegboard media 1"
"""Part of each digest: what is made of pixels may change from one version to the next."""
DIGEST_BYTES = 32
OPEN_FILES = 128
BUFFER = 1 << 20
"""Bytes of pixels that are written at once."""
TOO_COMPLEX = "media_too_complex"
FULL = "media_store_full"
NO_DISK = "media_disk_full"
"""Code of a reply about pixels that could not be written, for this side only."""


class Start(msgspec.Struct):
    """What the process is to be. `factory` and `options_model` are lazy names, `media` the folder of the files that
    jobs name, `memory` the bytes of address space that it may have, `seconds` the computing time of one item.
    """

    factory: str
    options_model: str
    options: dict[str, Any]
    directory: str
    hf_config: dict[str, Any]
    limits: MediaLimits
    media: str
    memory: int
    seconds: float


class Work(msgspec.Struct):
    """An item: the file that was received, and the empty one for at most `most` bytes of pixels, or of states."""

    kind: MediaKind
    received: str
    prepared: str
    most: int
    settings: MediaSettings
    encoded: EncodedForm | None = None


class Reply(msgspec.Struct):
    """What came of it, or the error: status 0 where there is none. `spent`: this process should make way for a new
    one.
    """

    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    grid: tuple[int, int, int] = (0, 0, 0)
    pieces: int = 0
    times: tuple[float, ...] = ()
    encoded: EncodedStates | None = None
    digest: bytes = b""
    error: str = ""
    status: int = 0
    code: str = ""
    spent: bool = False


class _WrongAnswer(Exception):
    """A processor says something else than it has done."""


class PixelFile(io.RawIOBase):
    """The file that pixels go to: hashes them, and takes `most` bytes."""

    def __init__(self, path: Path, most: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._most = most
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size = 0
        self.full = False
        """Whether it could not take all, because it is too much."""
        self.broken = ""
        """Why the system could not take all, "" where it could."""

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        self.full |= self.size + len(view) > self._most
        if self.full:
            raise OSError(errno.EFBIG, "too many pixels")
        try:
            count = os.write(self._file, view)
        except OSError as error:
            self.full = error.errno == errno.EFBIG
            self.broken = "" if self.full else str(error)
            raise
        self._hash.update(view[:count])
        self.size += count
        return count

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()

    def digest(self) -> bytes:
        """Return the digest of what was written, 32 bytes."""
        return self._hash.digest()


def digest(kind: MediaKind, shape: MediaShape, content: bytes, encoded: EncodedStates | None = None) -> bytes:
    """Return an item's digest, 32 bytes. `content` is that of its pixels or states alone."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    sizes = (shape.shape, shape.grid, shape.pieces, shape.times)
    whole.update(msgspec.msgpack.encode((VERSION, kind, *sizes, encoded, content)))
    return whole.digest()


def make_processor(start: Start) -> MediaProcessor:
    """Return the processor, from its lazy names."""
    from pkgutil import resolve_name

    options = resolve_name(start.options_model).model_validate(start.options)
    made: MediaProcessor = resolve_name(start.factory)(
        options, MediaContext(Path(start.directory), start.hf_config, start.limits)
    )
    return made


def prepare(processor: MediaProcessor, work: Work, media: Path) -> Reply:
    """Return the reply to one item, whatever happens short of a crash."""
    try:
        pixels = PixelFile(media / work.prepared, work.most)
    except OSError:
        return _unwanted()
    with pixels:
        try:
            out = io.BufferedWriter(pixels, BUFFER)
            shape, encoded = _make(processor, work, media, out)
            out.flush()
            if problem := _problem(shape, None if encoded else pixels.size):
                raise _WrongAnswer(problem)
            made = digest(work.kind, shape, pixels.digest(), encoded)
            return Reply(shape.shape, shape.grid, shape.pieces, shape.times, encoded, made)
        except Exception as error:
            if pixels.broken:
                return Reply(error=pixels.broken, status=503, code=NO_DISK)
            if not (media / work.received).exists():
                return _unwanted()
            return Reply(status=503, code=FULL) if pixels.full else _refusal(error)


def _unwanted() -> Reply:
    """Return the reply to an item whose files were removed, because no request waits for it any more."""
    return Reply(error="this is not wanted any more", status=503, code="media_helper_lost")


def _make(processor: MediaProcessor, work: Work, media: Path, out: BinaryIO) -> tuple[MediaShape, EncodedStates | None]:
    """Write the pixels of an item, or the states that came in their place; its shape, and what the states are."""
    form = work.encoded
    if form is None:
        return processor.prepare(MediaSource(work.kind, media / work.received, work.settings), out), None
    states = copy_states(form, media / work.received, out)
    return processor.shape_of(work.kind, form.grid, form.times, states.shape[0]), states


def _problem(shape: object, size: int | None) -> str:
    """Return what is wrong with what a processor says that it has written, "" for nothing. `size` is None where it has
    not written.
    """
    if not isinstance(shape, MediaShape):
        return f"the processor answered {shape!r}"
    numbers = (*shape.shape, *shape.grid, shape.pieces)
    # A processor is a plugin, whose types are not checked here.
    if [type(one) for one in numbers] != [int] * 8 or min(numbers) < 1 or shape.shape[3] != 3:
        return f"the processor answered sizes {numbers}"
    if shape.shape[0] % shape.pieces or not all(type(one) is float and math.isfinite(one) for one in shape.times):
        return f"the processor answered {shape.pieces} pieces and times {shape.times}"
    if size is not None and math.prod(shape.shape) != size:
        return f"the processor wrote {size} bytes for pixels of the shape {shape.shape}"
    return ""


def _refusal(error: Exception) -> Reply:
    """Return the reply to an item that cannot be prepared."""
    if isinstance(error, InvalidRequest):
        return Reply(error=error.message, status=error.status, code=error.code)
    if isinstance(error, (MemoryError, RecursionError)):
        # What a library leaves behind after that is not known.
        return Reply(error="decoding this takes more memory than it may", status=400, code=TOO_COMPLEX, spent=True)
    if isinstance(error, _WrongAnswer):
        logger.error("%s", error)
        return Reply(error="this could not be prepared", status=500, code="internal_error")
    _log.log(logging.WARNING, "media cannot be decoded:\n%s", "".join(traceback.format_exception(error)))
    text = "this cannot be decoded: it is damaged, or of a format that is not supported"
    return Reply(error=text, status=400, code="invalid_media")


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent's affair
    state: list[tuple[Start, MediaProcessor]] = []

    def answer(data: bytes) -> bytes:
        if not state:
            return msgspec.msgpack.encode(_begin(data, state))
        start, processor = state[0]
        work = msgspec.msgpack.decode(data, type=Work)
        with computing(start.seconds):
            reply = prepare(processor, work, Path(start.media))
        return msgspec.msgpack.encode(reply)

    serve(answer)
    return 0


def _begin(data: bytes, state: list[tuple[Start, MediaProcessor]]) -> Reply:
    start = msgspec.msgpack.decode(data, type=Start)
    most = 3 * start.limits.resized_pixels
    kinds = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, start.memory), (resource.RLIMIT_NOFILE, OPEN_FILES))
    limit([*kinds, (resource.RLIMIT_FSIZE, most)])
    try:
        processor = make_processor(start)
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}", status=500)
    try:
        # What was mapped before the limit may exceed it, and then only the first item would show.
        mmap.mmap(-1, BUFFER).close()
    except OSError:
        return Reply(error=f"the {start.memory} bytes of media.helper_bytes are too few", status=500)
    state.append((start, processor))
    return Reply()


if __name__ == "__main__":
    sys.exit(main())
