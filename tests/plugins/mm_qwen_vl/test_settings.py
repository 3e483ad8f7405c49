"""A model's settings, in all the ways in which they have been written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.media.api import MediaContext
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings, read_settings
from tests.plugins.mm_qwen_vl.models import ARCHITECTURES, IDS, config, processor

EDGES = {"shortest_edge": 5000, "longest_edge": 60_000}
TYPE = {"image_processor_type": "Qwen2VLImageProcessor"}
SPELLINGS: dict[str, Mapping[str, Any]] = {
    "by pixels": {"preprocessor_config.json": {"min_pixels": 5000, "max_pixels": 60_000}},
    "by edges": {"preprocessor_config.json": {"size": EDGES}},
    "pixels come first": {"preprocessor_config.json": {"min_pixels": 5000, "size": {**EDGES, "shortest_edge": 1}}},
    "nested": {"processor_config.json": {"image_processor": {"size": EDGES, **TYPE}}},
    "nested first": {
        "processor_config.json": {"image_processor": {"size": EDGES, **TYPE}},
        "preprocessor_config.json": {"min_pixels": 7, "max_pixels": 8},
    },
    "not nested": {"processor_config.json": {"processor_class": "x"}, "preprocessor_config.json": {"size": EDGES}},
}


def write(directory: Path, files: Mapping[str, Any]) -> Path:
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value), "utf-8")
    return directory


def read(directory: Path, files: Mapping[str, Any], family: str = "qwen2", **vision: Any) -> ModelSettings:
    return read_settings(config(family, **vision), write(directory, files))


@pytest.mark.parametrize("name", SPELLINGS)
def test_pictures_are_bounded_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, SPELLINGS[name]).image
    size = Qwen2VLImageProcessorPil.from_pretrained(tmp_path, local_files_only=True).size
    assert (found.min_pixels, found.max_pixels) == (size["shortest_edge"], size["longest_edge"]) == (5000, 60_000)


def test_pixels_in_size(tmp_path: Path) -> None:
    """As transformers 4 wrote it, and 5 does not read any more."""
    found = read(tmp_path, {"preprocessor_config.json": {"size": {"min_pixels": 5000, "max_pixels": 60_000}}}).image
    assert (found.min_pixels, found.max_pixels) == (5000, 60_000)


def test_without_files_the_class_decides(tmp_path: Path) -> None:
    default = Qwen2VLImageProcessorPil()
    for family in ("qwen2", "qwen3"):
        found = read(tmp_path, {}, family)
        edges = (default.size["shortest_edge"], default.size["longest_edge"])
        assert (found.image.min_pixels, found.image.max_pixels) == edges
        assert (found.video.fps, found.video.min_frames, found.video.max_frames) == (2.0, 4, 768)
    assert found.video.pixels.max_pixels == 32 * 32 * 768
    assert read(tmp_path, {}).video.pixels.max_pixels == 28 * 28 * 768


def test_videos_have_settings_of_their_own_or_those_of_pictures(tmp_path: Path) -> None:
    pictures = {"preprocessor_config.json": {"min_pixels": 5000, "max_pixels": 60_000}}
    assert read(tmp_path, pictures).video.pixels.max_pixels == 60_000
    own = {"video_preprocessor_config.json": {"size": EDGES | {"longest_edge": 99_000}, "fps": 1, "max_frames": 20}}
    found = read(tmp_path, own).video
    assert (found.pixels.max_pixels, found.fps, found.max_frames) == (99_000, 1.0, 20)
    nested = {"processor_config.json": {"video_processor": {"size": EDGES, "cap_pixels_per_frame": True}}}
    found = read(tmp_path, nested).video
    assert (found.pixels.max_pixels, found.cap_tokens) == (60_000, 128_000)
    assert read(tmp_path, nested).image.max_pixels == 60_000


def test_the_network_decides_on_patches(tmp_path: Path) -> None:
    found = read(tmp_path, {}, "qwen3", patch_size=12, spatial_merge_size=3)
    assert found.geometry.factor == 36
    bare = read_settings({"architectures": [ARCHITECTURES["qwen2_5"]], "vision_config": {}}, tmp_path)
    assert (bare.geometry.patch_size, bare.geometry.temporal_patch_size, bare.geometry.merge_size) == (14, 2, 2)
    assert (bare.tokens_per_second, bare.image_token_id, bare.vision_end_token_id) == (4.0, 151655, 151653)


BAD: dict[str, tuple[dict[str, Any], Mapping[str, Any], str]] = {
    "another architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        {},
        "architecture LlamaForCausalLM is not one of",
    ),
    "no architecture": ({"architectures": None}, {}, "architecture none is not one of"),
    "no vision": ({"vision_config": None}, {}, "no vision_config"),
    "a patch of no size": ({"vision_config": {"patch_size": 0}}, {}, "patch_size must be an integer from 1"),
    "a patch that is true": ({"vision_config": {"spatial_merge_size": True}}, {}, "spatial_merge_size must be"),
    "an id that is none": ({"image_token_id": "x"}, {}, "image_token_id must be a token's id"),
    "another network": (
        {},
        {"preprocessor_config.json": {"patch_size": 16}},
        "patch_size is 16, and config.json says 14",
    ),
    "no resizing": ({}, {"preprocessor_config.json": {"do_resize": False}}, "do_resize is off"),
    "no filter": ({}, {"preprocessor_config.json": {"resample": "bicubic"}}, "resample must be a filter of Pillow"),
    "no pixels": ({}, {"preprocessor_config.json": {"max_pixels": -1}}, "max_pixels must be an integer from 1"),
    "no rate": ({}, {"video_preprocessor_config.json": {"fps": 0}}, "fps must be a number above 0"),
    "a list": ({}, {"preprocessor_config.json": []}, "must hold a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_model_says_is_an_objection(tmp_path: Path, name: str) -> None:
    changes, files, message = BAD[name]
    ctx = MediaContext(write(tmp_path, files), {**config("qwen2"), **changes})
    assert message in (QwenVLProcessor.supports(QwenVLProcessorOptions(), ctx) or "")
    with pytest.raises(ModelError):
        read_settings(ctx.hf_config, tmp_path)


def test_without_pillow_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.plugins.mm_qwen_vl.processor.find_spec", lambda name: None)
    ctx = MediaContext(tmp_path, config("qwen2"))
    with pytest.raises(ModuleNotFoundError) as caught:
        QwenVLProcessor.supports(QwenVLProcessorOptions(), ctx)
    assert caught.value.name == "PIL"


def test_reserved_spellings_are_the_tokenizers_own_too(tmp_path: Path) -> None:
    usual = processor(tmp_path, "qwen2").reserved
    assert {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"} == usual
    added = [
        {"id": IDS["image_token_id"], "content": "<picture>", "special": True},
        {"id": 3, "content": "<other>", "special": True},
    ]
    found = processor(tmp_path, "qwen2", {"tokenizer.json": {"added_tokens": added, "model": {"vocab": {}}}}).reserved
    assert found == {*usual, "<picture>"}
    (tmp_path / "tokenizer.json").write_text("{")
    assert processor(tmp_path, "qwen2").reserved == usual
