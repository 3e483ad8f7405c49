"""The suite of MediaProcessor on QwenVLProcessor, for each family."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from pegboard.plugins.media.suite.media_processor import MediaProcessorContract
from pegboard.toolkit.media.inputs import MediaKind
from tests.plugins.mm_qwen_vl.clips import video_file
from tests.plugins.mm_qwen_vl.models import IDS, config

FILES = {
    "preprocessor_config.json": {"min_pixels": 3136, "max_pixels": 50176},
    "video_preprocessor_config.json": {"size": {"shortest_edge": 3136, "longest_edge": 50176}},
}
PLACEHOLDERS: dict[MediaKind, int] = {"image": IDS["image_token_id"], "video": IDS["video_token_id"]}


def files(kind: MediaKind) -> Sequence[bytes]:
    """A JPEG of 90 x 60, a PNG of 33 x 70; a clip in FFV1 and one in H.264."""
    rng = np.random.default_rng(3)
    if kind == "image":
        found = []
        for size, name in (((60, 90, 3), "JPEG"), ((70, 33, 3), "PNG")):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(file, name)
            found.append(file.getvalue())
        return found
    frames = rng.integers(0, 256, (30, 32, 64, 3), dtype=np.uint8)
    return (
        video_file(frames[:7, :, :48]),
        video_file(frames, container="mp4", codec="libx264", pixels="yuv420p"),
    )


class TestQwen3(MediaProcessorContract):
    provider = "qwen_vl"
    config = config("qwen3")
    files = FILES
    placeholders = PLACEHOLDERS

    def media(self, kind: MediaKind) -> Sequence[bytes]:
        return files(kind)


class TestQwen25(TestQwen3):
    config = config("qwen2_5")


# What they share with these two is nearly all.


@pytest.mark.full
class TestQwen2(TestQwen3):
    config = config("qwen2")


@pytest.mark.full
class TestQwen25AsTransformers(TestQwen3):
    options = {"mrope_after_video": "transformers"}
    config = config("qwen2_5")


@pytest.mark.full
class TestQwen3Moe(TestQwen3):
    config = config("qwen3_moe")
