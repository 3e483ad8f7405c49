"""What the modes of Pillow and the sample depths of PNG mean, stated plainly, and what becomes of them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pegboard.plugins.mm_qwen_vl.pictures import to_rgb

Array = NDArray[np.float64]
SAMPLES = 64


def grey(values: Array) -> Array:
    return np.repeat(values[:, :1], 3, axis=1)


def over_white(colours: Array, alpha: Array) -> Array:
    return (colours * alpha + 255 * (255 - alpha)) / 255


def from_ycbcr(values: Array) -> Array:
    """ITU-R BT.601, full range, as JFIF has it."""
    y, cb, cr = values[:, 0], values[:, 1] - 128, values[:, 2] - 128
    return np.clip(np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], 1), 0, 255)


MODES: dict[str, tuple[str, int, Callable[[Array], Array]]] = {
    "1": ("bool", 1, lambda v: grey(v * 255)),
    "L": ("uint8", 1, grey),
    "LA": ("uint8", 2, lambda v: over_white(grey(v), v[:, 1:])),
    "RGB": ("uint8", 3, lambda v: v),
    "RGBX": ("uint8", 4, lambda v: v[:, :3]),
    "RGBA": ("uint8", 4, lambda v: over_white(v[:, :3], v[:, 3:])),
    "CMYK": ("uint8", 4, lambda v: (255 - v[:, :3]) * (255 - v[:, 3:]) / 255),
    "YCbCr": ("uint8", 3, from_ycbcr),
    "I;16": ("<u2", 1, lambda v: grey(v // 256)),
    "I;16L": ("<u2", 1, lambda v: grey(v // 256)),
    "I;16B": (">u2", 1, lambda v: grey(v // 256)),
    "I": ("<i4", 1, lambda v: grey(v // 256)),
}
"""The type and the number of a pixel's samples, and its colour. "I" is what 16-bit pictures are in older versions."""


@pytest.mark.parametrize("mode", MODES)
def test_modes_mean_what_they_say(mode: str) -> None:
    kind, bands, meaning = MODES[mode]
    most = {"bool": 2, "uint8": 256}.get(kind, 65536)
    values = np.random.default_rng(0).integers(0, most, (SAMPLES, bands))
    values[0], values[1] = 0, most - 1
    raw = values.astype(kind).tobytes() if mode != "1" else np.packbits(values.astype(bool)).tobytes()
    image = Image.frombytes(mode, (SAMPLES, 1), raw)
    found = np.asarray(to_rgb(image))[0].astype(float)
    # Pillow computes in integers: half a step of rounding, twice where a colour is made of two products.
    assert np.abs(found - meaning(values.astype(float))).max() <= (0 if bands == 1 else 1.5)


def png(depth: int, colour: int, samples: NDArray[np.int64], through: tuple[int, ...] = ()) -> bytes:
    """A PNG of one row. `colour` is 0 for grey, 2 for RGB, 4 and 6 with alpha; `through` is the transparent one."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + samples.astype(">u2" if depth == 16 else "u1").tobytes()
    marked = chunk(b"tRNS", struct.pack(f">{len(through)}H", *through)) if through else b""
    head = struct.pack(">IIBBBBB", len(samples), 1, depth, colour, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", head), marked, chunk(b"IDAT", zlib.compress(row)), chunk(b"IEND", b""))
    )


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_sixteen_bits_look_like_eight(colour: int) -> None:
    """A picture in 16 bits has the pixels of the same one in 8, in all colour types."""
    bands = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    values = np.random.default_rng(colour).integers(0, 256, (SAMPLES, bands))
    eight, sixteen = (
        np.asarray(to_rgb(Image.open(io.BytesIO(png(depth, colour, scaled)))))
        for depth, scaled in ((8, values), (16, values * 257))
    )
    assert eight.std() > 0
    assert np.array_equal(eight, sixteen)


def test_a_value_of_sixteen_bits_that_shows_through_is_white() -> None:
    found = np.asarray(to_rgb(Image.open(io.BytesIO(png(16, 0, np.array([[0], [0x8000], [0x8001]]), (0x8000,))))))
    assert found[0, :, 0].tolist() == [0, 255, 0x80]
