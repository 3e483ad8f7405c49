"""How pixels become numbers, read from the settings of a model's processor. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pegboard.plugins.mm_qwen_vl.vision_spec import bad_value
from pegboard.toolkit.media.inputs import MediaKind
from pegboard.toolkit.model.hf_files import read_json_object

Channels = tuple[float, float, float]

CLIP: tuple[Channels, Channels] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation that Qwen2-VL and Qwen2.5-VL were trained with."""

HALF: tuple[Channels, Channels] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Those of Qwen3-VL."""


@dataclass(frozen=True, slots=True)
class PixelSpec:
    """How bytes become numbers: (x * scale - mean) / std, with mean and std per channel."""

    scale: float
    mean: Channels
    std: Channels

    @classmethod
    def from_directory(cls, directory: Path, kind: MediaKind, default: tuple[Channels, Channels]) -> PixelSpec:
        """Read the settings of a processor from the model's directory, as transformers looks for them.

        processor_config.json comes first where it holds an `image_processor` or `video_processor`, then
        video_preprocessor_config.json for video, then preprocessor_config.json. Where that says nothing of mean and
        std they are `default`. Raises ModelError naming the file and the key of a value that it does not understand.
        """
        values, file = _processor_values(directory, kind)
        scales, centres = (_switch(values, key, file) for key in ("do_rescale", "do_normalize"))
        factor = values.get("rescale_factor")
        factor = 1 / 255 if factor is None else factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e30:
            raise bad_value("rescale_factor", factor, "a positive number", file)
        mean = _channels(values, "image_mean", default[0], file)
        std = _channels(values, "image_std", default[1], file)
        if min(std) <= 0:
            raise bad_value("image_std", std, "positive", file)
        return cls(
            scale=float(factor) if scales else 1.0,
            mean=mean if centres else (0.0, 0.0, 0.0),
            std=std if centres else (1.0, 1.0, 1.0),
        )


def _processor_values(directory: Path, kind: MediaKind) -> tuple[Mapping[str, object], str]:
    """Return the settings for a kind of media, and the name of the file that holds them, for errors."""
    whole = directory / "processor_config.json"
    nested = read_json_object(whole).get(f"{kind}_processor")
    if isinstance(nested, Mapping):
        return nested, f"{whole}: {kind}_processor"
    names = ["preprocessor_config.json"]
    if kind == "video":
        names.insert(0, "video_preprocessor_config.json")
    found = next((directory / name for name in names if (directory / name).is_file()), directory / names[-1])
    return read_json_object(found), str(found)


def _switch(values: Mapping[str, object], key: str, file: str) -> bool:
    value = values.get(key)
    if not isinstance(value, bool | None):
        raise bad_value(key, value, "true or false", file)
    return value is not False


def _channels(values: Mapping[str, object], key: str, default: Channels, file: str) -> Channels:
    value = values.get(key)
    if value is None:
        return default
    found = value if isinstance(value, list) else [value] * 3
    numbers = [one for one in found if isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < 1e30]
    if len(found) != 3 or len(numbers) != 3:
        raise bad_value(key, value, "three numbers", file)
    return float(numbers[0]), float(numbers[1]), float(numbers[2])
