"""Prepares pictures and videos for the Qwen-VL models, and lays them out in prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import BinaryIO

import msgspec
import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest, ModelError
from pegboard.plugins.media.api import (
    Encode,
    MediaContext,
    MediaItem,
    MediaLayout,
    MediaProcessor,
    MediaShape,
    MediaSource,
)
from pegboard.plugins.mm_qwen_vl.layout import encoded_shape, lay_out, places
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.settings import read_settings
from pegboard.plugins.mm_qwen_vl.survey import expected_pixels
from pegboard.toolkit.media.inputs import MediaKind

_KINDS: frozenset[MediaKind] = frozenset(("image", "video"))
VIDEO_PIXELS = 2**26
"""What a video costs at least, in pixels: however short its file, it may have many frames."""
_SPELLINGS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """What of tokenizer.json is read: decoding skips the vocabulary, which is large."""

    added_tokens: list[_AddedToken] = []


class QwenVLProcessor(MediaProcessor[QwenVLProcessorOptions]):
    """Pictures with Pillow, videos with PyAV. Cheap to build: it reads the model's small JSON files."""

    def __init__(self, options: QwenVLProcessorOptions, ctx: MediaContext) -> None:
        super().__init__(options, ctx)
        self._model = read_settings(ctx.hf_config, ctx.directory)

    @classmethod
    def supports(cls, options: QwenVLProcessorOptions, ctx: MediaContext) -> str | None:
        """Return None for a Qwen-VL model whose settings can be read. Raises ModuleNotFoundError without Pillow."""
        try:
            read_settings(ctx.hf_config, ctx.directory)
        except ModelError as error:
            return str(error)
        if find_spec("PIL") is None:
            raise ModuleNotFoundError("pictures need Pillow", name="PIL")
        return None

    @property
    def kinds(self) -> frozenset[MediaKind]:
        return _KINDS

    @cached_property
    def reserved(self) -> frozenset[str]:
        """The spellings that all these models share, and what else the tokenizer has for the ids of config.json."""
        model = self._model
        ids = (model.image_token_id, model.video_token_id, model.vision_start_token_id, model.vision_end_token_id)
        file = self.ctx.directory / "tokenizer.json"
        try:
            added = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).added_tokens
        except (OSError, msgspec.DecodeError):  # whatever is wrong with it, the tokenizer says so
            added = []
        return frozenset((*_SPELLINGS, *(one.content for one in added if one.id in ids and one.content)))

    def expected_pixels(self, source: MediaSource) -> int:
        """Of a video only its decoder knows what it costs."""
        return (
            expected_pixels(source.file) if source.kind == "image" else VIDEO_PIXELS + super().expected_pixels(source)
        )

    def prepare(self, source: MediaSource, out: BinaryIO) -> MediaShape:
        if source.kind == "image":
            from pegboard.plugins.mm_qwen_vl.pictures import prepare_picture

            return prepare_picture(source, out, self._model, self.ctx.limits)
        if find_spec("av") is None:
            raise InvalidRequest(
                "this server cannot read videos: its extra pegboard[video] is not installed", code="unsupported"
            )
        from pegboard.plugins.mm_qwen_vl.video import prepare_video

        return prepare_video(source, out, self._model, self.ctx.limits)

    def shape_of(self, kind: MediaKind, grid: tuple[int, int, int], times: Sequence[float], tokens: int) -> MediaShape:
        """Grids count patches, `patch_size` pixels high and wide and `temporal_patch_size` frames deep."""
        return encoded_shape(kind, grid, times, tokens, self._model, self.ctx.limits)

    def check_places(self, ids: Sequence[int], kinds: Sequence[MediaKind]) -> None:
        places(np.asarray(ids), kinds, self._model)

    def part(self, kind: MediaKind) -> Mapping[str, object]:
        return {"type": kind}

    def lay_out(self, ids: Sequence[int], items: Sequence[MediaItem], encode: Encode) -> MediaLayout:
        return lay_out(ids, items, encode, self._model, self.options.mrope_after_video)
