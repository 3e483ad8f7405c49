"""The size that pictures and frames are resized to: transformers' `smart_resize`, for pictures and for two kinds of
video, between bounds that the model, the request and the operator set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits
from pegboard.plugins.mm_qwen_vl.settings import Geometry, ModelSettings
from pegboard.toolkit.media.inputs import MediaSettings

LOW_DETAIL_TOKENS = 256
"""Most tokens of a picture, and of each frame before two are merged in time, with `detail: low`."""

MOST_ELONGATED = 200
"""How many times the shorter side the longer one may be."""

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and most pixels: of a picture or a frame, or of all frames of a Qwen3-VL video."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Most pixels of a resized item, all its frames together, and the config's key that says so."""

    pixels: int
    key: str


def image_size(source: Size, model: ModelSettings, asked: MediaSettings, limits: MediaLimits) -> Size:
    """Return what a picture is resized to. Raises InvalidRequest for one that is too long and narrow, and for bounds
    that the limits do not allow.
    """
    factor = model.geometry.factor
    allowed = _allowed(1, factor, limits)
    _check_bounds(asked, 1, allowed)
    bounds = _bounded(Bounds(model.image.min_pixels, model.image.max_pixels), 1, factor, asked)
    return _fitted(smart_size(source, factor, bounds), source, 1, factor, allowed)


def video_size(source: Size, frames: int, model: ModelSettings, asked: MediaSettings, limits: MediaLimits) -> Size:
    """Return what each of `frames` sampled frames is resized to. Raises InvalidRequest as `image_size` does."""
    geometry, factor = model.geometry, model.geometry.factor
    # A shorter video is padded: transformers refuses it.
    frames = max(frames, geometry.temporal_patch_size)
    padded = frames + -frames % geometry.temporal_patch_size
    allowed = _allowed(padded, factor, limits)
    _check_bounds(asked, padded, allowed)
    if model.family == "qwen3":
        size = smart_clip_size(source, frames, geometry, _bounded(_capped(frames, model), frames, factor, asked))
    else:
        size = smart_size(source, factor, _bounded(_capped(frames, model), 1, factor, asked))
    return _fitted(size, source, padded, factor, allowed)


def smart_size(source: Size, factor: int, bounds: Bounds) -> Size:
    """Return multiples of `factor` near the source's sides, within the bounds, with nearly its aspect ratio."""
    height, width = source
    _check_ratio(source)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > bounds.most:
        return _shrunk(source, math.sqrt((height * width) / bounds.most), factor)
    if new_height * new_width < bounds.least:
        return _grown(source, math.sqrt(bounds.least / (height * width)), factor)
    return new_height, new_width


def smart_clip_size(source: Size, frames: int, geometry: Geometry, bounds: Bounds) -> Size:
    """Return the size of each frame by Qwen3-VL's rule, whose bounds are those of all frames together."""
    (height, width), factor, step = source, geometry.factor, geometry.temporal_patch_size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio((height, width))
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(frames / step) * step * new_height * new_width
    if pixels > bounds.most:
        return _shrunk((height, width), math.sqrt((frames * height * width) / bounds.most), factor)
    if pixels < bounds.least:
        return _grown((height, width), math.sqrt(bounds.least / (frames * height * width)), factor)
    return new_height, new_width


def _shrunk(source: Size, beta: float, factor: int) -> Size:
    height, width = (max(factor, math.floor(side / beta / factor) * factor) for side in source)
    return height, width


def _grown(source: Size, beta: float, factor: int) -> Size:
    height, width = (math.ceil(side * beta / factor) * factor for side in source)
    return height, width


def _check_ratio(source: Size) -> None:
    if max(source) / min(source) > MOST_ELONGATED:
        raise _elongated(source)


def _elongated(source: Size) -> InvalidRequest:
    return InvalidRequest(
        f"this has {source[1]} x {source[0]} pixels: the longer side may be at most {MOST_ELONGATED} times the shorter "
        "one",
        code="invalid_media",
    )


def _capped(frames: int, model: ModelSettings) -> Bounds:
    """Return the model's own bounds for a video, with its `cap_pixels_per_frame`."""
    least, most, cap = model.video.pixels.min_pixels, model.video.pixels.max_pixels, model.video.cap_tokens
    square = model.geometry.factor**2
    if cap is None:
        return Bounds(least, most)
    if model.family == "qwen3":
        return Bounds(least, frames * max(min(cap * square, most // frames), int(least * 1.05)))
    share = int(cap * square * 0.9) * model.geometry.temporal_patch_size // frames
    return Bounds(least, max(min(most, share), int(least * 1.05)))


def _allowed(frames: int, factor: int, limits: MediaLimits) -> _Allowed:
    """Return the most pixels of all resized frames together. A token is made of factor by factor pixels of each of the
    frames in a piece.
    """
    if limits.piece_tokens is None or limits.resized_pixels <= frames * limits.piece_tokens * factor**2:
        return _Allowed(limits.resized_pixels, "media.max_resized_pixels")
    return _Allowed(frames * limits.piece_tokens * factor**2, "media.max_piece_tokens")


def _check_bounds(asked: MediaSettings, frames: int, allowed: _Allowed) -> None:
    """Raise InvalidRequest for bounds that contradict each other, or the limits. An upper bound is never too large: it
    counts as far as the limits allow it.
    """
    for name, value in (("min_pixels", asked.min_pixels), ("max_pixels", asked.max_pixels)):
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)
    least, most = asked.min_pixels or 0, asked.max_pixels
    if most is not None and least > most:
        raise InvalidRequest(
            f"min_pixels is {least}, more than max_pixels, {most}", param="min_pixels", fields=("max_pixels",)
        )
    if least * frames > allowed.pixels:
        raise InvalidRequest(
            f"min_pixels is {least}, and this server allows {allowed.pixels // frames} here ({allowed.key})",
            param="min_pixels",
        )


def _bounded(own: Bounds, frames: int, factor: int, asked: MediaSettings) -> Bounds:
    """Return the model's bounds with those of the request, which are for each of `frames` that are bounded together."""
    least, most = own.least, own.most
    if asked.detail == "low":
        most = min(most, LOW_DETAIL_TOKENS * factor**2 * frames)
    if asked.max_pixels is not None:
        most = asked.max_pixels * frames
    if asked.min_pixels is not None:
        least = asked.min_pixels * frames
        most = max(most, least)
    return Bounds(min(least, most), most)


def _fitted(size: Size, source: Size, frames: int, factor: int, allowed: _Allowed) -> Size:
    """Return the size, or a smaller one where the limits do not allow it. Raises InvalidRequest where none is small
    enough, because a side has at least one token.
    """
    limit = allowed.pixels
    if frames * size[0] * size[1] > limit:
        size = _shrunk(source, math.sqrt(frames * source[0] * source[1] / limit), factor)
    if frames * size[0] * size[1] > limit:
        raise InvalidRequest(
            f"with {source[1]} x {source[0]} pixels{f' in {frames} frames' if frames > 1 else ''}, this has at least "
            f"{frames * size[0] * size[1]} pixels when it is resized, in tokens of {factor} x {factor}, and this "
            f"server allows {limit} ({allowed.key})",
            code="media_too_large",
        )
    return size
