"""Pictures of all modes and formats, with and without an orientation, from a number."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

LONGEST = 3000
KINDS = (
    *(("JPEG", mode) for mode in ("RGB", "RGB", "L", "CMYK")),
    *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "1", "P", "P-transparent", "L-transparent", "I;16")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("GIF", mode) for mode in ("P", "P-transparent", "animated")),
    *(("BMP", mode) for mode in ("RGB", "L", "P", "1")),
)
"""Formats, and the modes that they are written in."""


def random_picture(seed: int) -> tuple[str, bytes]:
    """A picture's description and its file. Every kind comes once in as many seeds as there are kinds."""
    rng = random.Random(seed)
    name, mode = KINDS[seed % len(KINDS)]
    width, height = _size(rng)
    orientation = rng.randint(1, 8) if name in ("JPEG", "PNG", "WEBP") and rng.random() < 0.5 else 0
    image = _image(mode, width, height, seed)
    file = io.BytesIO()
    image.save(file, name, **_saving(name, mode, image, orientation, rng))
    return f"{name} {mode} {width}x{height} orientation {orientation}", file.getvalue()


def _size(rng: random.Random) -> tuple[int, int]:
    """Sides from 1 to 3000, small ones as often as large ones, whose ratio the models take."""
    while True:
        width, height = (round(LONGEST ** rng.random()) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            return width, height


def _image(mode: str, width: int, height: int, seed: int) -> Image.Image:
    """Waves and noise: every value occurs, and files stay small."""
    numbers = np.random.default_rng(seed)
    y, x = np.ogrid[:height, :width]
    planes = [
        127.5 * (1 + np.sin(x / numbers.uniform(2, 60) + phase) * np.cos(y / numbers.uniform(2, 60)))
        for phase in range(4)
    ]
    pixels = np.stack([np.broadcast_to(plane, (height, width)) for plane in planes], axis=-1)
    pixels = np.clip(pixels + numbers.integers(-8, 9, pixels.shape, dtype=np.int8), 0, 255).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 2 + pixels[..., 1])
    grey = Image.fromarray(pixels[..., 0])
    simple = {"L": grey, "L-transparent": grey, "1": grey.convert("1")}
    if mode in simple:
        return simple[mode]
    if mode == "LA":
        return Image.merge("LA", (grey, Image.fromarray(pixels[..., 3])))
    if mode in ("RGBA", "CMYK"):
        return Image.merge(mode, [Image.fromarray(pixels[..., i]) for i in range(4)])
    colour = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    return colour if mode == "RGB" else colour.quantize(32)


def _saving(name: str, mode: str, image: Image.Image, orientation: int, rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    if name == "JPEG":
        options.update(quality=rng.randint(30, 100), progressive=rng.random() < 0.3)
    if name == "WEBP":
        options.update(lossless=rng.random() < 0.5, quality=rng.randint(30, 100), method=0)
    if name == "PNG":
        options.update(compress_level=1, pnginfo=PngImagePlugin.PngInfo())
    if mode.endswith("-transparent"):
        options["transparency"] = bytes(range(0, 256, 8)) if name == "PNG" and mode.startswith("P") else 7
    if mode == "animated":
        options.update(save_all=True, append_images=[image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)], duration=100)
    return options
