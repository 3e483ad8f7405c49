"""What a picture's file says of itself, found without decoding anything: its size, and how many parts and scans it has.

Pillow walks through chunks, segments and blocks one by one, in Python, and libjpeg decodes all pixels anew in each
scan. A file of some KB may have as many of them as take minutes, so they are counted before.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pegboard.core.interfaces.errors import InvalidRequest

MAX_PARTS = 20_000
"""Most chunks of a PNG, segments of a JPEG and blocks before the first frame of a GIF. A PNG of 50 MiB has 6,400 chunks
as libpng writes them.
"""
MAX_SCANS = 64
"""Most scans of a JPEG. Progressive ones have about ten."""
SCANS_OF_A_DECODE = 16
"""Scans that take about as long as everything else that is done for a pixel."""
BYTE_PIXELS = 2
"""What a byte of a file costs, in pixels."""
_PIECE = 1 << 20
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker of a JPEG outside of a scan's data."""
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_SIZES = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}
"""JPEG's segments that begin a frame, and say how large it is."""


@dataclass(slots=True)
class Survey:
    """What was found. Zeros where a format is not known, or is damaged."""

    width: int = 0
    height: int = 0
    parts: int = 0
    scans: int = 0

    def check(self) -> None:
        """Raise InvalidRequest for more parts and scans than are read."""
        if self.parts > MAX_PARTS:
            raise _too_complex(f"this picture's file has more than {MAX_PARTS} parts")
        if self.scans > MAX_SCANS:
            raise _too_complex(f"this JPEG has more than {MAX_SCANS} scans, each of which decodes the whole picture")


def survey(file: Path) -> Survey:
    """Return what a file says. Counts no further than one beyond the bounds. Raises OSError."""
    found = Survey()
    if not file.stat().st_size:
        return found
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        # A file that ends within a field is damaged.
        contextlib.suppress(struct.error, IndexError),
    ):
        for start, read in _READERS.items():
            if data[: len(start)] == start:
                read(data, found)
    return found


def expected_pixels(file: Path) -> int:
    """Return about how many pixels' decoding a picture costs: its own, more for a JPEG with many scans, and some for
    each byte. Raises OSError.
    """
    found, size = survey(file), file.stat().st_size
    if found.parts > MAX_PARTS or found.scans > MAX_SCANS:
        # It is refused at once.
        return 0
    pixels = found.width * found.height or 8 * size
    return pixels + pixels * found.scans // SCANS_OF_A_DECODE + BYTE_PIXELS * size


def _png(data: mmap.mmap, found: Survey) -> None:
    found.width, found.height = struct.unpack_from(">II", data, 16)
    at = 8
    while at < len(data) and found.parts <= MAX_PARTS:
        length, kind = struct.unpack_from(">I4s", data, at)
        at += length + 12
        found.parts += 1
        if kind == b"IEND":
            return


def _jpeg(data: mmap.mmap, found: Survey) -> None:
    for kind, at in _segments(data, 2):
        found.parts += 1
        found.scans += kind == _SOS
        if kind in _SIZES and not found.width:
            found.height, found.width = struct.unpack_from(">HH", data, at + 3)
        if found.scans > MAX_SCANS or found.parts > MAX_PARTS:
            return


def _segments(data: mmap.mmap, at: int) -> Iterator[tuple[int, int]]:
    """Yield the kind of each segment up to the picture's end, and where its length stands."""
    while at < len(data):
        marker = _MARKER.search(data, at, at + _PIECE)
        if marker is None:
            # A marker may lie across the seam.
            at += _PIECE - 1
            continue
        kind, at = data[marker.end() - 1], marker.end()
        if kind == _EOI:
            return
        if kind not in (_SOI, _TEM):
            yield kind, at
            at += struct.unpack_from(">H", data, at)[0]


def _gif(data: mmap.mmap, found: Survey) -> None:
    found.width, found.height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at < len(data) and found.parts <= MAX_PARTS:
        kind, at = data[at], at + 1
        found.parts += 1
        if kind == ord(","):
            left, top, width, height = struct.unpack_from("<HHHH", data, at)
            found.width, found.height = max(found.width, left + width), max(found.height, top + height)
            return
        if kind == ord("!"):
            at += 1
            while (length := data[at]) and found.parts <= MAX_PARTS:
                at += 1 + length
                found.parts += 1
            at += 1


def _bmp(data: mmap.mmap, found: Survey) -> None:
    (header,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)
    found.width, found.height = abs(width), abs(height)


def _webp(data: mmap.mmap, found: Survey) -> None:
    kind = data[12:16]
    if kind == b"VP8X":
        found.width, found.height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    elif kind == b"VP8 ":
        found.width, found.height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        found.width, found.height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


_READERS = {b"\x89PNG\r\n\x1a\n": _png, b"\xff\xd8": _jpeg, b"GIF8": _gif, b"BM": _bmp, b"RIFF": _webp}
"""By what a file begins with."""


def _too_complex(text: str) -> InvalidRequest:
    return InvalidRequest(text, code="media_too_complex")
