"""Model directories and processors that tests use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.plugins.media.api import MediaContext, MediaLimits
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor

ARCHITECTURES = {
    "qwen2": "Qwen2VLForConditionalGeneration",
    "qwen2_5": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3VLForConditionalGeneration",
    "qwen3_moe": "Qwen3VLMoeForConditionalGeneration",
}
IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
NORMAL = {
    "qwen2": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "qwen2_5": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "qwen3": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""What pixels from 0 to 1 are normalised with: mean and standard deviation of each colour."""
NORMALISED = 2e-6
"""How far two float32 ways to pixels (x / 255 - mean) / std may be apart, where std is 0.26 or more. Numbers up to 1,
their difference and a result up to 2.7 are rounded on each way, by 2^-24 of themselves: 9e-7. A step of x is 0.015.
"""
GENEROUS = MediaLimits(max_pixels=2**30, resized_pixels=2**40, max_frames=10**6, max_seconds=10**6)


def config(family: str, **vision: Any) -> dict[str, Any]:
    """The config.json of a model of this family, as far as the processor reads it."""
    patch = 16 if family.startswith("qwen3") else 14
    speed = {"tokens_per_second": 2} if family == "qwen2_5" else {}
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "spatial_merge_size": 2, **speed, **vision}
    return {"architectures": [ARCHITECTURES[family]], "vision_config": sizes, **IDS}


def processor(
    directory: Path,
    family: str,
    files: Mapping[str, Any] | None = None,
    *,
    limits: MediaLimits | None = None,
    **options: Any,
) -> QwenVLProcessor:
    """A processor of a model whose directory has these JSON files."""
    for name, value in (files or {}).items():
        (directory / name).write_text(json.dumps(value), "utf-8")
    ctx = MediaContext(directory, config(family), limits or MediaLimits())
    made = QwenVLProcessorOptions(**options)
    assert QwenVLProcessor.supports(made, ctx) is None
    return QwenVLProcessor(made, ctx)
