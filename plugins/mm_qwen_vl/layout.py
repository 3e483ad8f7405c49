"""Prompts with media: placeholders become as many tokens as a model's vision tower has states, with positions on three
axes.

Text counts on all three axes. A patch has the next position, plus its row and its column on two of the axes; on the
time axis videos of Qwen2-VL and 2.5-VL add the patch's time. In Qwen3-VL each temporal patch of a video follows its
time, written as text, and is laid out as a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import Encode, MediaItem, MediaLayout, MediaLimits, MediaShape, MediaSpan
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings
from pegboard.toolkit.media.inputs import MediaKind

AfterVideo = Literal["trained", "transformers"]


def lay_out(
    ids: Sequence[int], items: Sequence[MediaItem], encode: Encode, model: ModelSettings, after_video: AfterVideo
) -> MediaLayout:
    """See `MediaProcessor.lay_out`."""
    given = np.asarray(ids, dtype=np.int64)
    where = places(given, [item.kind for item in items], model)
    layout = _Layout(model, after_video)
    start = 0
    for index, (place, item) in enumerate(zip(where, items, strict=True)):
        layout.add_text(given[start:place])
        layout.add_item(index, item, encode)
        start = place + 1
    layout.add_text(given[start:])
    return layout.finished()


def encoded_shape(
    kind: MediaKind,
    grid: tuple[int, int, int],
    times: Sequence[float],
    tokens: int,
    model: ModelSettings,
    limits: MediaLimits,
) -> MediaShape:
    """See `MediaProcessor.shape_of`."""
    geometry, (steps, height, width) = model.geometry, grid
    merge, is_video = geometry.merge_size, kind == "video"
    if min(grid) < 1 or height % merge or width % merge or (steps > 1 and not is_video):
        one = "" if is_video else ", and 1 before them"
        raise _wrong(f"the grid {list(grid)} must have a height and a width that {merge} divides{one}")
    made = steps * height * width // merge**2
    if made != tokens:
        raise _wrong(f"the grid {list(grid)} makes {made} tokens, and {tokens} states came with it")
    frames = geometry.temporal_patch_size * steps if is_video else 1
    if frames > limits.max_frames:
        raise _wrong(f"{frames} frames are more than the {limits.max_frames} that a video may have (media.max_frames)")
    needed = _times(kind, steps, model)
    if len(times) != needed:
        raise _wrong(f"a grid of {steps} steps needs {needed} times, and {len(times)} came with it")
    # Qwen2.5-VL's one time is how long each step takes, Qwen3-VL's are when each of them is.
    longest = limits.max_seconds / (steps if model.family == "qwen2_5" else 1)
    if not all(0 <= one <= longest for one in times):
        raise _wrong(f"times must be seconds from 0 to {longest:g} (media.max_seconds)")
    side = geometry.patch_size
    shape = (frames, height * side, width * side, 3)
    return MediaShape(shape, grid, steps if is_video else 1, tuple(map(float, times)))


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(text, code="invalid_media")


def _times(kind: MediaKind, steps: int, model: ModelSettings) -> int:
    """Return how many times an item has: one for each step in Qwen3-VL, one interval in Qwen2.5-VL."""
    if kind == "image":
        return 0
    return {"qwen2": 0, "qwen2_5": 1, "qwen3": steps}[model.family]


def places(ids: NDArray[np.integer[Any]], asked: Sequence[MediaKind], model: ModelSettings) -> list[int]:
    """Return where the placeholders are. Raises InvalidRequest where they are not those of items of the kinds asked."""
    is_video = ids == model.video_token_id
    found = np.flatnonzero(is_video | (ids == model.image_token_id))
    kinds: list[MediaKind] = ["video" if one else "image" for one in is_video[found]]
    if kinds != list(asked):
        order = ", in another order" if sorted(kinds) == sorted(asked) else ""
        raise InvalidRequest(
            f"the prompt has placeholders for {_counted(kinds)}, but {_counted(asked)} came with it{order}",
            code="media_mismatch",
        )
    return list(map(int, found))


def _counted(kinds: Sequence[MediaKind]) -> str:
    images, videos = kinds.count("image"), kinds.count("video")
    return f"{images} image{'s' * (images != 1)} and {videos} video{'s' * (videos != 1)}"


class _Layout:
    """A prompt that is being laid out, from left to right."""

    def __init__(self, model: ModelSettings, after_video: AfterVideo) -> None:
        self._model = model
        self._after_video = after_video
        self._ids: list[NDArray[np.int64]] = []
        self._positions: list[NDArray[np.int32]] = []
        self._spans: list[MediaSpan] = []
        self._length = 0
        self._next = 0
        self._largest = -1

    def add_text(self, ids: NDArray[np.int64]) -> None:
        if len(ids):
            row = np.arange(self._next, self._next + len(ids), dtype=np.int32)
            self._add(ids, np.broadcast_to(row, (3, len(ids))), self._next + len(ids) - 1)
            self._next += len(ids)

    def add_item(self, index: int, item: MediaItem, encode: Encode) -> None:
        times, height, width = _grid(item, index, self._model)
        token = self._model.video_token_id if item.kind == "video" else self._model.image_token_id
        if item.kind == "video" and self._model.family == "qwen3":
            end = np.array([self._model.vision_end_token_id], dtype=np.int64)
            for piece, seconds in enumerate(item.times):
                text = [*encode(f"<{seconds:.1f} seconds>"), self._model.vision_start_token_id]
                self.add_text(np.asarray(text, dtype=np.int64))
                self._add_patches(index, piece, token, np.zeros(1, np.int32), height, width)
                self.add_text(end)
            return
        self._add_patches(index, 0, token, self._steps(item, times), height, width)

    def _steps(self, item: MediaItem, times: int) -> NDArray[np.int32]:
        """Return the position of each temporal patch, from 0 on."""
        steps = np.arange(times, dtype=np.int32)
        if item.kind == "image" or self._model.family == "qwen2":
            return steps
        # In float32 throughout, as transformers computes it.
        interval = np.float32(self._model.tokens_per_second) * np.float32(item.times[0])
        return (steps.astype(np.float32) * interval).astype(np.int32)

    def _add_patches(
        self, index: int, piece: int, token: int, steps: NDArray[np.int32], height: int, width: int
    ) -> None:
        """Add the pieces of an item from `piece` on, one for each of `steps`."""
        each = height * width
        block = np.empty((3, len(steps), height, width), dtype=np.int32)
        block[0] = steps[:, None, None]
        block[1] = np.arange(height, dtype=np.int32)[:, None]
        block[2] = np.arange(width, dtype=np.int32)
        block += self._next
        self._spans += [MediaSpan(index, piece + i, self._length + i * each, each) for i in range(len(steps))]
        largest = self._next + max(int(steps[-1]), height - 1, width - 1)
        self._add(np.full(len(steps) * each, token, dtype=np.int64), block.reshape(3, -1), largest)
        self._next = largest + 1 if self._after_video == "trained" else self._next + max(height, width)

    def _add(self, ids: NDArray[np.int64], positions: NDArray[np.int32], largest: int) -> None:
        self._ids.append(ids)
        self._positions.append(positions)
        self._length += len(ids)
        self._largest = max(self._largest, largest)

    def finished(self) -> MediaLayout:
        if not self._length:
            return MediaLayout(np.empty(0, np.int64), (), np.empty((3, 0), np.int32), 0)
        return MediaLayout(
            np.concatenate(self._ids),
            tuple(self._spans),
            np.concatenate(self._positions, axis=1),
            self._largest + 1 - self._length,
        )


def _grid(item: MediaItem, index: int, model: ModelSettings) -> tuple[int, int, int]:
    """Return an item's grid in tokens. Raises InvalidRequest for one that no item of the model has."""
    times, height, width = item.grid
    merge = model.geometry.merge_size
    needed = _times(item.kind, times, model)
    pieces = times if item.kind == "video" else 1
    whole = min(item.grid) > 0 and height % merge == width % merge == 0
    if not whole or item.pieces != pieces or (item.kind == "image" and times != 1):
        raise InvalidRequest(f"item {index} has the grid {item.grid} and {item.pieces} pieces", code="invalid_media")
    if len(item.times) != needed:
        raise InvalidRequest(f"item {index} has {len(item.times)} times, not {needed}", code="invalid_media")
    return times, height // merge, width // merge
