"""A digest of a model's weights that does not read all of them."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.cache.block_keys import framed
from pegboard.toolkit.model.weights import read_header

logger = logging.getLogger(__name__)

LOOK_BYTES = 4096
"""What is read of a tensor, at its beginning and at its end: rows that were added to a vocabulary stand there."""
NO_WEIGHTS = {".json", ".md", ".txt", ".jinja", ".py", ".model"}
"""Files that are never looked at: the config counts by what was made of it."""

_GGUF = struct.Struct("<4sIQQ")
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type."""
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_LONGEST_NAME = 2**20
_ALIGNMENT = 32
"""Tensors begin at multiples of this, unless the file says otherwise."""


def weights_digest(directory: str | os.PathLike[str]) -> bytes:
    """Return SHA-256 over the tensors of all safetensors and GGUF files of a directory, by name: dtype, shape, and the
    first and last 4 KB of each. Where files are, what they are called and how tensors are spread over them counts for
    nothing.

    A file that is neither, or cannot be read as one, counts with its size, its beginning and its end; so do files of
    other formats where there are none of these two. Raises OSError where a file cannot be read.
    """
    entries: list[bytes] = []
    files = sorted(path for path in Path(directory).iterdir() if path.is_file())
    known = [path for path in files if path.suffix in (".safetensors", ".gguf")]
    for path in known or [path for path in files if path.suffix not in NO_WEIGHTS]:
        with path.open("rb", buffering=0) as file:
            entries += _entries(path, file)
    whole = hashlib.sha256()
    for entry in sorted(entries):
        whole.update(framed(entry))
    return whole.digest()


def _entries(path: Path, file: BinaryIO) -> list[bytes]:
    try:
        if path.suffix == ".safetensors":
            tensors = read_header(path)
            return [
                _entry(file, name, f"{one.dtype} {list(one.shape)}", one.start, one.nbytes)
                for name, one in tensors.items()
            ]
        if path.suffix == ".gguf":
            return [_entry(file, *found) for found in _gguf_tensors(path)]
    except (ModelError, ValueError, OverflowError, struct.error) as error:
        logger.info("%s counts as a whole: %s", path, error)
    return [_entry(file, "", "file", 0, path.stat().st_size)]


def _entry(file: BinaryIO, name: str, kind: str, start: int, size: int) -> bytes:
    """Return what stands for a tensor, or a file."""
    look = min(size, LOOK_BYTES)
    ends = [os.pread(file.fileno(), look, place) for place in (start, start + size - look)]
    return framed(name.encode("utf-8", "surrogatepass"), f"{kind} {size}".encode(), *ends)


def _gguf_tensors(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, type with shape, start and size of each tensor. Raises ValueError and struct.error for what is no
    GGUF file.
    """
    with path.open("rb") as file:
        magic, version, count, fields = _GGUF.unpack(file.read(_GGUF.size))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"no GGUF file of version 2 or 3, but {magic!r} of version {version}")
        alignment = _ALIGNMENT
        for _ in range(fields):
            key = _string(file)
            (kind,) = _numbers(file, "I")
            if key == b"general.alignment" and kind == 4:
                (alignment,) = _numbers(file, "I")
            else:
                _skip(file, kind)
        tensors = []
        for _ in range(count):
            name = _string(file).decode("utf-8", "surrogateescape")
            (axes,) = _numbers(file, "I")
            shape = _numbers(file, f"{axes}Q")
            kind, start = _numbers(file, "IQ")
            tensors.append((start, name, f"{kind} {list(shape)}"))
        begin = -(-file.tell() // max(1, alignment)) * max(1, alignment)
    tensors.sort()
    ends = [start for start, _, _ in tensors[1:]] + [path.stat().st_size - begin]
    for (start, name, what), end in zip(tensors, ends, strict=True):
        yield name, what, begin + start, end - start


def _numbers(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _string(file: BinaryIO) -> bytes:
    (size,) = _numbers(file, "Q")
    if size > _LONGEST_NAME:
        raise ValueError(f"a name of {size} bytes")
    return file.read(size)


def _skip(file: BinaryIO, kind: int) -> None:
    """Go on behind a value."""
    if kind == _GGUF_STRING:
        (size,) = _numbers(file, "Q")
        file.seek(size, os.SEEK_CUR)
    elif kind == _GGUF_ARRAY:
        kind, count = _numbers(file, "IQ")
        if kind in _GGUF_SIZES:
            file.seek(count * _GGUF_SIZES[kind], os.SEEK_CUR)
        else:
            for _ in range(count):
                _skip(file, kind)
    elif kind in _GGUF_SIZES:
        file.seek(_GGUF_SIZES[kind], os.SEEK_CUR)
    else:
        raise ValueError(f"a value of the unknown type {kind}")
