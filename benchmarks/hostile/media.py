"""Pictures meant to hurt, and an honest one: requests of a chat with one picture."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib

from benchmarks.hostile.payloads import MEGABYTE, Ask

SIDE = 8192
"""Of the largest square that `media.max_pixels` allows by default."""
LARGEST_BODY = 60 * MEGABYTE
"""Somewhat below the default of `media.max_body_bytes`."""
_URL, _COUNT = "@url@", '"@count@"'


def ask_of(url: str, count: str = "4") -> Ask:
    """Return a chat about a picture; `url` and `count`, its max_tokens, go into the body as they are."""
    parts = [{"type": "image_url", "image_url": {"url": _URL}}, {"type": "text", "text": "What do you see?"}]
    body = {"model": "m", "max_tokens": "@count@", "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    text = json.dumps(body, separators=(",", ":")).replace(_COUNT, count)
    return Ask("/v1/chat/completions", text.replace(_URL, url).encode())


def picture(data: bytes) -> Ask:
    """Return a chat about a picture's file."""
    return ask_of("data:image/png;base64," + base64.b64encode(data).decode())


def honest(rng: random.Random) -> Ask:
    """Return a small picture, each time another one."""
    rows = b"".join(b"\0" + rng.randbytes(3 * 64) for _ in range(64))
    return picture(png(64, 64, zlib.compress(rows)))


def scans(side: int = SIDE, count: int = 300) -> Ask:
    """Return a grey JPEG, in which so many scans more are decoded than it needs, of 99 bytes each."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (side, side), 9).save(file, "JPEG", progressive=True, quality=5)
    whole = file.getvalue()
    last = whole.rindex(b"\xff\xda")
    return picture(whole[:-2] + whole[last:-2] * count + whole[-2:])


def many_pixels(side: int = SIDE) -> Ask:
    """Return a PNG of one colour, with as many pixels as a picture may have."""
    return picture(png(side, side, zeros(side * (1 + 4 * side)), colour=6))


def many_chunks(count: int = 500_000) -> Ask:
    """Return a small PNG with so many comments."""
    return picture(png(64, 64, zeros(64 * (1 + 3 * 64)), before=_chunk(b"tEXt", b"a\0b") * count))


def escapes(size: int = LARGEST_BODY) -> Ask:
    """Return an address of nothing but escapes, beside a number that has a body parsed twice."""
    return ask_of("data:;base64," + r"\u0001" * (size // 6), "2.0")


def line_ends(size: int = LARGEST_BODY) -> Ask:
    """Return an address of nothing but the ends of lines, which base64 may have, beside such a number."""
    return ask_of("data:;base64," + r"\n" * (size // 2), "2.0")


def png(width: int, height: int, data: bytes, *, colour: int = 2, before: bytes = b"") -> bytes:
    """Return a PNG of 8 bits with these compressed rows, and these chunks in front of them."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def zeros(size: int) -> bytes:
    """Return so many zeros, compressed at once, whatever their number."""
    packer = zlib.compressobj(9, wbits=-15)
    packer.compress(bytes(MEGABYTE))
    packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MEGABYTE)) + packer.flush(zlib.Z_FULL_FLUSH)
    rest = zlib.compressobj(9, wbits=-15)
    end = rest.compress(bytes(size % MEGABYTE)) + rest.flush()
    return b"\x78\xda" + block * (size // MEGABYTE) + end + struct.pack(">HH", size % 65521, 1)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
