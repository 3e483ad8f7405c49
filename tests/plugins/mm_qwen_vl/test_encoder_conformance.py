"""The suite of MediaEncoder on the towers of all four families."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.plugins.media.api import MediaItem
from pegboard.plugins.media.suite.media_encoder import MediaEncoderContract
from tests.plugins.mm_qwen_vl.vision_cases import image, video


class TestQwen3VL(MediaEncoderContract):
    """With the suite's own model, as `pegboard plugins check` runs it."""

    provider = "qwen_vl"


class _QwenVL(TestQwen3VL):
    family: ClassVar[str]
    patch: ClassVar[int] = 14

    def make_model(self, directory: Path) -> Path:
        return vl_checkpoint(directory, self.family)

    def make_items(self) -> list[MediaItem]:
        return [image(self.patch, 2, 2), image(self.patch, 6, 12), video(self.patch, 3, 10, 4)]


class TestQwen2VL(_QwenVL):
    family = "qwen2_vl"


class TestQwen25VL(_QwenVL):
    family = "qwen2_5_vl"


class TestQwen3VLMoe(_QwenVL):
    family, patch = "qwen3_vl_moe", 16
