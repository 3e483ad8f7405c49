"""A processor of media that needs no library: pictures in PPM.

A picture is a file in the format P6 ("P6 WIDTH
HEIGHT 255", one blank, and the bytes of the pixels); a video is several of one size in a row, and each is a piece.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import (
    Encode,
    MediaContext,
    MediaItem,
    MediaLayout,
    MediaProcessor,
    MediaShape,
    MediaSource,
    MediaSpan,
)
from pegboard.toolkit.media.inputs import MediaKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


TOKENS = ("<|media|>", "<|image|>", "<|video|>")
"""The tokens that mean media, in the order of their ids."""
KEY = "toy_media"
"""Where a model's config.json says how the toy reads media; see `ToySettings`."""
FPS = 2.0
_HEAD = re.compile(rb"P6\s(\d{1,6})\s(\d{1,6})\s255\s")


@dataclasses.dataclass(frozen=True)
class ToySettings:
    """What config.json says. A patch has `block` x `block` pixels and is one token. With `axes` 3 patches have
    positions of their own in time, height and width, as in the Qwen-VL models; with 1 they count like text.
    """

    image_token_id: int
    video_token_id: int
    block: int = 8
    axes: int = 1

    @classmethod
    def of(cls, hf_config: Mapping[str, object]) -> ToySettings | None:
        found = hf_config.get(KEY)
        return cls(**found) if isinstance(found, dict) else None


class ToyProcessor(MediaProcessor[NoOptions]):
    """Pictures and videos in PPM, padded to whole patches with their last row and column. Of a video each frame follows
    its time as text ("0.5s").
    """

    def __init__(self, options: NoOptions, ctx: MediaContext) -> None:
        super().__init__(options, ctx)
        settings = ToySettings.of(ctx.hf_config)
        assert settings is not None, "supports() was not asked"
        self.settings = settings

    @classmethod
    def supports(cls, options: NoOptions, ctx: MediaContext) -> str | None:
        return None if ToySettings.of(ctx.hf_config) else f"the model's config.json has no {KEY}"

    @property
    def kinds(self) -> frozenset[MediaKind]:
        return frozenset(("image", "video"))

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset(TOKENS)

    def prepare(self, source: MediaSource, out: BinaryIO) -> MediaShape:
        frames, most, block = 0, self.ctx.limits.resized_pixels, self.settings.block
        size: tuple[int, int] | None = None
        for frame in self._frames(source):
            padded = self._resized(frame, source)
            if size is not None and padded.shape[:2] != size:
                raise InvalidRequest("the frames of this video differ in size", code="invalid_media")
            size = padded.shape[0], padded.shape[1]
            frames += 1
            if frames * size[0] * size[1] > most:
                raise InvalidRequest(f"resized, this has more than {most} pixels", code="media_too_large")
            tokens = self.ctx.limits.piece_tokens
            if tokens is not None and size[0] * size[1] > tokens * block**2:
                raise InvalidRequest(f"resized, this has more than {tokens} tokens", code="media_too_large")
            out.write(padded.tobytes())
        if size is None:
            raise InvalidRequest("this file has no frames", code="invalid_media")
        times = tuple(i / FPS for i in range(frames)) if source.kind == "video" else ()
        grid = (frames, size[0] // block, size[1] // block)
        return MediaShape((frames, *size, 3), grid, frames if source.kind == "video" else 1, times)

    def shape_of(self, kind: MediaKind, grid: tuple[int, int, int], times: Sequence[float], tokens: int) -> MediaShape:
        frames, height, width = grid
        pieces = frames if kind == "video" else 1
        if min(grid) < 1 or frames * height * width != tokens or pieces != frames:
            raise InvalidRequest(f"a grid {list(grid)} does not come to {tokens} states", code="invalid_media")
        stamps = frames if kind == "video" else 0
        if len(times) != stamps or not all(0 <= one < math.inf for one in times):
            raise InvalidRequest(f"a grid of {frames} frames has {stamps} times in seconds", code="invalid_media")
        block = self.settings.block
        return MediaShape((frames, height * block, width * block, 3), grid, pieces, tuple(times))

    def part(self, kind: MediaKind) -> Mapping[str, object]:
        return {"type": kind}

    def check_places(self, ids: Sequence[int], kinds: Sequence[MediaKind]) -> None:
        tokens = self._tokens
        found = [tokens[one] for one in ids if one in tokens]
        if found != list(kinds):
            raise InvalidRequest(
                f"the prompt has placeholders for {found}, and the media are {list(kinds)}", code="media_mismatch"
            )

    @property
    def _tokens(self) -> dict[int, MediaKind]:
        return {self.settings.image_token_id: "image", self.settings.video_token_id: "video"}

    def lay_out(self, ids: Sequence[int], items: Sequence[MediaItem], encode: Encode) -> MediaLayout:
        self.check_places(ids, [item.kind for item in items])
        tokens = self._tokens
        layout = _Layout(self.settings.axes)
        waiting = iter(enumerate(items))
        for one in ids:
            if one in tokens:
                layout.add_item(one, *next(waiting), encode)
            else:
                layout.add_text([one])
        return layout.finished()

    def _frames(self, source: MediaSource) -> Iterator[NDArray[np.uint8]]:
        limits, data, at = self.ctx.limits, source.file.read_bytes(), 0
        most = limits.max_frames if source.kind == "video" else 1
        for number in range(most + 1):
            if number and at == len(data):
                return
            if number == most:
                raise InvalidRequest(f"this has more than {most} frames", code="media_too_large")
            head = _HEAD.match(data, at)
            if head is None:
                raise InvalidRequest("this is not a picture in the format PPM (P6)", code="invalid_media")
            width, height = int(head[1]), int(head[2])
            if not 0 < width * height <= limits.max_pixels:
                text = f"a picture of {width} x {height} pixels, where {limits.max_pixels} are allowed"
                raise InvalidRequest(text, code="media_too_large")
            at = head.end() + width * height * 3
            if len(data) < at:
                raise InvalidRequest("this picture is truncated", code="invalid_media")
            yield np.frombuffer(data, np.uint8, width * height * 3, head.end()).reshape(height, width, 3)

    def _resized(self, frame: NDArray[np.uint8], source: MediaSource) -> NDArray[np.uint8]:
        """Leave out rows and columns as the request's `max_pixels` says, and fill up the last patches."""
        most, step = source.settings.max_pixels, 1
        while most is not None and step < max(frame.shape) and frame[::step, ::step, 0].size > most:
            step += 1
        block, kept = self.settings.block, frame[::step, ::step]
        more = [(0, -length % block) for length in kept.shape[:2]]
        return np.pad(kept, [*more, (0, 0)], mode="edge")


class _Layout:
    """A prompt that is being laid out."""

    def __init__(self, axes: int) -> None:
        self._axes = axes
        self._ids: list[int] = []
        self._positions: list[tuple[int, int, int]] = []
        self._spans: list[MediaSpan] = []
        self._next = 0

    def add_text(self, ids: Sequence[int]) -> None:
        self._positions += [(self._next + i,) * 3 for i in range(len(ids))]
        self._ids += ids
        self._next += len(ids)

    def add_item(self, token: int, index: int, item: MediaItem, encode: Encode) -> None:
        _, height, width = item.grid
        for piece in range(item.pieces):
            if item.times:
                self.add_text(list(encode(f"{item.times[piece]:.1f}s")))
            self._spans.append(MediaSpan(index, piece, len(self._ids), height * width))
            if self._axes == 1:
                self.add_text([token] * (height * width))
                continue
            at = self._next
            self._ids += [token] * (height * width)
            self._positions += [(at, at + row, at + column) for row in range(height) for column in range(width)]
            self._next += max(height, width)

    def finished(self) -> MediaLayout:
        positions = np.array(self._positions, np.int32).reshape(-1, 3).T
        ids = np.array(self._ids, np.int64)
        return MediaLayout(ids, tuple(self._spans), np.ascontiguousarray(positions), self._next - len(self._ids))
