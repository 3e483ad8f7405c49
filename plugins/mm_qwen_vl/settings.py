"""What the files of a Qwen-VL model say about its pictures and videos.

transformers has written these settings in several ways. They are looked for in its own order: in processor_config.json
under `image_processor` and `video_processor`, then in files of their own; a video without settings takes those of
pictures. Pixels are bounded by `min_pixels` and `max_pixels`, or in `size` by these or by `shortest_edge` and
`longest_edge`, which mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.hf_files import read_json_object

Family = Literal["qwen2", "qwen2_5", "qwen3"]

FAMILIES: Mapping[str, Family] = {
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3",
}
"""Architectures, and the family whose rules they follow."""

BICUBIC = 3
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """How pixels become patches, and patches tokens. `factor` is the side of a token's square of pixels."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """The bounds of resized pixels, and Pillow's filter for resizing."""

    min_pixels: int
    max_pixels: int
    resample: int


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """How a video is sampled and resized. The bounds in `pixels` hold for a frame in Qwen2-VL and 2.5-VL, and for all
    frames together in Qwen3-VL. `cap_tokens` is None where `cap_pixels_per_frame` is off.
    """

    pixels: PixelSettings
    fps: float
    min_frames: int
    max_frames: int
    cap_tokens: int | None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """All that the processor reads of a model. Ids are those of placeholders, and of what stands around frames."""

    family: Family
    geometry: Geometry
    image: PixelSettings
    video: VideoSettings
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tokens_per_second: float


def read_settings(hf_config: Mapping[str, object], directory: Path) -> ModelSettings:
    """Return a model's settings, from its config.json and the files beside it.

    Raises ModelError for another architecture, and for values that no model has, naming file and key.
    """
    family = _family(hf_config)
    vision = hf_config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelError("config.json has no vision_config, so the model takes no pictures")
    where = "vision_config of config.json"
    geometry = Geometry(
        patch_size=_count(vision, "patch_size", 16 if family == "qwen3" else 14, where),
        temporal_patch_size=_count(vision, "temporal_patch_size", 2, where),
        merge_size=_count(vision, "spatial_merge_size", 2, where),
    )
    (image, image_file), (video, video_file) = _processor_configs(directory)
    for config, file in ((image, image_file), (video, video_file)):
        _check_geometry(config, geometry, file)
    return ModelSettings(
        family=family,
        geometry=geometry,
        image=_pixels(image, (56 * 56, 28 * 28 * 1280), image_file),
        video=_video(video, family, geometry, video_file),
        image_token_id=_id(hf_config, "image_token_id", 151655),
        video_token_id=_id(hf_config, "video_token_id", 151656),
        vision_start_token_id=_id(hf_config, "vision_start_token_id", 151652),
        vision_end_token_id=_id(hf_config, "vision_end_token_id", 151653),
        tokens_per_second=_number(vision, "tokens_per_second", 4.0, where),
    )


def _family(hf_config: Mapping[str, object]) -> Family:
    names = hf_config.get("architectures")
    names = names if isinstance(names, Sequence) and not isinstance(names, str) else ()
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    stated = ", ".join(map(str, names)) or "none"
    raise ModelError(f"architecture {stated:.200} is not one of {', '.join(FAMILIES)}")


def _processor_configs(directory: Path) -> tuple[tuple[Mapping[str, object], str], tuple[Mapping[str, object], str]]:
    """Return the settings of pictures and those of videos, each with the name of their file."""
    nested = read_json_object(directory / "processor_config.json")
    picture_file, video_file = "preprocessor_config.json", "video_preprocessor_config.json"
    image: Mapping[str, object] = read_json_object(directory / picture_file)
    if not (directory / video_file).exists():
        video_file = picture_file
    video: Mapping[str, object] = read_json_object(directory / video_file)
    found = []
    for key, config, file in (("image_processor", image, picture_file), ("video_processor", video, video_file)):
        value = nested.get(key)
        found.append((value, f"{key} of processor_config.json") if isinstance(value, Mapping) else (config, file))
    return found[0], found[1]


def _check_geometry(config: Mapping[str, object], geometry: Geometry, file: str) -> None:
    """Raise ModelError where pixels would be prepared for another network than the model's."""
    for key in ("patch_size", "temporal_patch_size", "merge_size"):
        expected = getattr(geometry, key)
        if _count(config, key, expected, file) != expected:
            raise ModelError(f"{file}: {key} is {config[key]!r:.80}, and config.json says {expected}")
    if config.get("do_resize") is False:
        raise ModelError(f"{file}: do_resize is off, and pictures of any size cannot be encoded")


def _pixels(config: Mapping[str, object], bounds: tuple[int, int], file: str) -> PixelSettings:
    size = config.get("size")
    size = size if isinstance(size, Mapping) else {}
    found = []
    for key, edge, default in (("min_pixels", "shortest_edge", bounds[0]), ("max_pixels", "longest_edge", bounds[1])):
        inner = _count(size, key, _count(size, edge, default, f"size of {file}"), f"size of {file}")
        found.append(_count(config, key, inner, file))
    resample = config.get("resample", BICUBIC)
    if isinstance(resample, bool) or not isinstance(resample, int) or not 0 <= resample <= 5:
        raise ModelError(f"{file}: resample must be a filter of Pillow, from 0 to 5, found {resample!r:.80}")
    return PixelSettings(found[0], found[1], resample)


def _video(config: Mapping[str, object], family: Family, geometry: Geometry, file: str) -> VideoSettings:
    if family == "qwen3":
        bounds, tokens = (128 * 32 * 32, 32 * 32 * 768), 768
    else:
        bounds, tokens = (128 * 28 * 28, 28 * 28 * 768), 128000
    tokens = _count(config, "max_video_tokens", tokens, file)
    least = _count(config, "min_frames", 4, file)
    return VideoSettings(
        pixels=_pixels(config, bounds, file),
        fps=_number(config, "fps", 2.0, file),
        min_frames=least,
        max_frames=max(_count(config, "max_frames", 768, file), least, geometry.temporal_patch_size),
        cap_tokens=tokens if config.get("cap_pixels_per_frame") is True else None,
    )


def _count(config: Mapping[str, object], key: str, default: int, where: str) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
        raise ModelError(f"{where}: {key} must be an integer from 1 to {_MOST}, found {value!r:.80}")
    return value


def _id(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ModelError(f"config.json: {key} must be a token's id, found {value!r:.80}")
    return value


def _number(config: Mapping[str, object], key: str, default: float, where: str) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} must be a number above 0, found {value!r:.80}")
    return float(value)
