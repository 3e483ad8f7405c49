"""Pictures, decoded with Pillow: the same pixels as transformers' Qwen2VLImageProcessorPil makes of them.

This module imports Pillow, so it is imported when a picture is prepared, in a helper process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base
from PIL.Image import Transpose

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits, MediaShape, MediaSource
from pegboard.plugins.mm_qwen_vl.damage import check_source, decoding
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings
from pegboard.plugins.mm_qwen_vl.sizes import image_size
from pegboard.plugins.mm_qwen_vl.survey import survey

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_STRIP = 256
"""Rows that are blended at once: a picture in RGBA has several copies while that is done."""


def prepare_picture(source: MediaSource, out: BinaryIO, model: ModelSettings, limits: MediaLimits) -> MediaShape:
    """Write a picture's pixels to `out`, and return their shape. Raises InvalidRequest for what is not one, for one
    that cannot be read to its end, and for what the limits do not allow.
    """
    with decoding("picture"):
        survey(source.file).check()
    with source.file.open("rb") as file:
        with decoding("picture"), _pillow_within(limits):
            image = _opened(file)
        check_source(image.width, image.height, limits)
        # Refused before its pixels are decoded. Turning it later swaps sides, and changes nothing of this.
        image_size((image.height, image.width), model, source.settings, limits)
        with decoding("picture"), _pillow_within(limits):
            image.load()
            image = upright(image)
        height, width = image_size((image.height, image.width), model, source.settings, limits)
        with decoding("picture"), _pillow_within(limits):
            # Rebound, so that the source's pixels are freed before they are resized.
            image = to_rgb(image)
            pixels = image.resize((width, height), resample=model.image.resample).tobytes()
    out.write(pixels)
    patch = model.geometry.patch_size
    return MediaShape((1, height, width, 3), (1, height // patch, width // patch))


def upright(image: Image.Image) -> Image.Image:
    """Return the picture as its EXIF orientation says, as Pillow's `exif_transpose` does, without a copy where there is
    nothing to turn. An orientation that cannot be read is none.
    """
    try:
        orientation = image.getexif().get(Base.Orientation, 1)
    except Exception:  # what stands in EXIF data is anything at all
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the picture in RGB, whatever it shows through blended with white, as transformers does; but one of 16-bit
    grey as viewers show it, where transformers has it white.
    """
    image = _in_bytes(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    blended = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        blended.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return blended


def _in_bytes(image: Image.Image) -> Image.Image:
    """Return a picture of 16-bit grey in 8 bits: the high byte of each sample, as Pillow reads 16-bit colours. Its own
    `convert` clips samples at 255. Premultiplied modes lose that.
    """
    plain = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)
    if plain is not None or not image.mode.startswith("I"):
        return image if plain is None else image.convert(plain)
    samples = image.convert("I")
    grey = samples.point([value >> 8 for value in range(65536)], "L")
    through = image.info.get("transparency")
    if through is None:
        return grey
    return Image.merge("LA", (grey, samples.point([255 * (value != through) for value in range(65536)], "L")))


def _opened(file: BinaryIO) -> Image.Image:
    """Return a picture whose header has been read."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(
            "this is not a picture in one of the formats JPEG, PNG, WebP, GIF and BMP, or its beginning is damaged",
            code="invalid_media",
        ) from None


@contextlib.contextmanager
def _pillow_within(limits: MediaLimits) -> Iterator[None]:
    """Make Pillow's warning of a decompression bomb an error, and its limit the server's, so that neither makes the
    other idle. Its other warnings are for authors of programs.
    """
    most = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = limits.max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise InvalidRequest(
            f"this has more pixels than this server allows, {limits.max_pixels}", code="media_too_large"
        ) from None
    finally:
        Image.MAX_IMAGE_PIXELS = most
