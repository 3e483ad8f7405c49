"""`data:` addresses: what they carry, piece by piece, so that a long one holds up nothing else."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from pegboard.core.interfaces.errors import InvalidRequest

PIECE = 64 * 1024
"""Characters that are taken apart at once: a fraction of a millisecond, in which no other thread runs."""
MAX_HEAD = 1024
"""Characters before the comma."""


def carried(url: str) -> Iterator[bytes]:
    """Yield the bytes that a `data:` address carries. The media type is ignored: what they are, they say themselves.

    Raises InvalidRequest for what is not such an address.
    """
    comma = check_head(url)
    in_base64 = url[5:comma].lower().rstrip().endswith(";base64")
    return _base64(url, comma + 1) if in_base64 else _plain(url, comma + 1)


def check_head(url: str) -> int:
    """Return where the comma is before what an address carries. Raises InvalidRequest where there is none."""
    comma = url.find(",", 0, MAX_HEAD)
    if url[:5].lower() != "data:" or comma < 0:
        raise _malformed("it must read data:[type][;base64],...")
    return comma


def _plain(url: str, start: int) -> Iterator[bytes]:
    while start < len(url):
        stop = _piece(url, start)
        yield unquote_to_bytes(_ascii(url[start:stop]))
        start = stop


_URL_SAFE = str.maketrans("-_", "+/")


def _base64(url: str, start: int) -> Iterator[bytes]:
    """As browsers read it: blanks do not count, and the padding may be missing. The letters - and _ will do, too."""
    rest, ended = "", False
    while start < len(url):
        stop = _piece(url, start)
        text = _ascii(url[start:stop])
        if "%" in text:
            text = unquote_to_bytes(text).decode("latin-1")
        text = rest + "".join(text.split()).translate(_URL_SAFE)
        start = stop
        if ended and text:
            raise _malformed("there is something after the end of its base64")
        whole = len(text) - len(text) % 4 if start < len(url) else len(text)
        rest, text = text[whole:], text[:whole]
        ended = text.endswith("=")
        yield _decoded(text)


def _decoded(text: str) -> bytes:
    padding = -len(text) % 4
    try:
        if padding == 3 or (padding and "=" in text):
            raise binascii.Error("wrong length")
        return binascii.a2b_base64(text + "=" * padding, strict_mode=True)
    except (binascii.Error, ValueError):
        raise _malformed("its base64 is not valid") from None


def _piece(url: str, start: int) -> int:
    """Return where a piece ends that does not cut an escaped character in two."""
    stop = min(start + PIECE, len(url))
    if stop < len(url):
        cut = url.rfind("%", stop - 2, stop)
        return stop if cut < 0 else cut
    return stop


def _ascii(text: str) -> str:
    if not text.isascii():
        raise _malformed("it has characters beyond ASCII")
    return text


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"this data: address is malformed: {why}", code="invalid_media_address")
