"""What the encoder reads of configs: towers, windows, and how pixels become numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.vision_utils import get_vision_window_index

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.mm_qwen_vl.encoder import QwenVLEncoder
from pegboard.plugins.mm_qwen_vl.pixel_spec import CLIP, HALF, PixelSpec
from pegboard.plugins.mm_qwen_vl.vision_spec import ARCHITECTURES, VisionSpec
from pegboard.plugins.mm_qwen_vl.vision_tower import window_order

QWEN2, QWEN25, QWEN3, QWEN3_MOE = ARCHITECTURES


def objection(architecture: str, **vision: Any) -> str | None:
    config = {"architectures": [architecture], "vision_config": vision}
    return QwenVLEncoder.supports(NoOptions(), ModelContext(Path(), config, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    config = getattr(transformers, architecture.replace("ForConditionalGeneration", "Config"))()
    stated = config.vision_config.to_dict()
    empty = VisionSpec.from_config({"architectures": [architecture], "vision_config": {}})
    assert empty == VisionSpec.from_config({"architectures": [architecture], "vision_config": stated})


@pytest.mark.parametrize(
    ("architecture", "vision", "key"),
    [
        (QWEN2, {"depth": "two"}, "depth"),
        (QWEN2, {"depth": 10**6}, "depth"),
        (QWEN2, {"embed_dim": 1280, "num_heads": 7}, "heads"),
        (QWEN2, {"embed_dim": 96, "num_heads": 16}, "multiple of 4"),
        (QWEN2, {"mlp_ratio": -1}, "mlp_ratio"),
        (QWEN2, {"patch_size": [14, 14]}, "patch_size"),
        (QWEN2, {"in_chans": 4}, "in_chans"),
        (QWEN2, {"hidden_act": "swoosh"}, "hidden_act"),
        (QWEN25, {"hidden_act": "quick_gelu"}, "hidden_act"),
        (QWEN25, {"window_size": 20}, "window_size"),
        (QWEN25, {"fullatt_block_indexes": "all"}, "fullatt_block_indexes"),
        (QWEN3, {"deepstack_visual_indexes": [1, 27]}, "deepstack_visual_indexes"),
        (QWEN3, {"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
        (QWEN3, {"num_position_embeddings": 0}, "num_position_embeddings"),
        (QWEN3, {"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters"),
        (QWEN3, {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ("LlamaForCausalLM", {}, "LlamaForCausalLM"),
    ],
    ids=str,
)
def test_refusals_name_the_key(architecture: str, vision: dict[str, Any], key: str) -> None:
    assert key in (objection(architecture, **vision) or "accepted")


def test_refuses_states_that_the_text_cannot_take() -> None:
    for text in ({"hidden_size": 64}, {"text_config": {"hidden_size": 64}}):
        config = {"architectures": [QWEN2], "vision_config": {"hidden_size": 32}, **text}
        with pytest.raises(ModelError, match=r"32 numbers.* 64"):
            VisionSpec.from_config(config)
    with pytest.raises(ModelError, match="vision_config must be an object"):
        VisionSpec.from_config({"architectures": [QWEN3]})


def test_windows_are_those_of_transformers() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rows, columns, side = draw.randint(1, 20), draw.randint(1, 20), draw.randint(1, 6)
        vision = {"window_size": side * 28, "patch_size": 14, "spatial_merge_size": 2}
        spec = VisionSpec.from_config({"architectures": [QWEN25], "vision_config": vision})
        order, segments = window_order(spec, rows, columns)
        assert order is not None
        sizes = [size // 4 for count, size in segments for _ in range(count)]
        found = {frozenset(window.tolist()) for window in order.split(sizes)}
        index, ends = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, side * 28, 14)
        theirs = index.split((ends.diff() // 4).tolist())
        assert found == {frozenset(window.tolist()) for window in theirs}
        assert sorted(order.tolist()) == list(range(rows * columns))
        assert len(segments) <= 4


ONE, TWO, THREE = ([n / 10, n / 20, n / 30] for n in (1, 2, 3))


def write(directory: Path, name: str, **values: Any) -> None:
    (directory / f"{name}.json").write_text(json.dumps(values), "utf-8")


class TestPixels:
    """Settings are looked for where transformers looks for them."""

    @staticmethod
    def means(directory: Path) -> tuple[list[float], list[float]]:
        image, video = (PixelSpec.from_directory(directory, kind, CLIP) for kind in ("image", "video"))
        return list(image.mean), list(video.mean)

    def test_one_file_for_both(self, tmp_path: Path) -> None:
        write(tmp_path, "preprocessor_config", image_mean=ONE)
        assert self.means(tmp_path) == (ONE, ONE)

    def test_a_file_for_videos(self, tmp_path: Path) -> None:
        write(tmp_path, "preprocessor_config", image_mean=ONE)
        write(tmp_path, "video_preprocessor_config", image_mean=TWO)
        assert self.means(tmp_path) == (ONE, TWO)

    def test_a_processor_comes_first(self, tmp_path: Path) -> None:
        write(tmp_path, "preprocessor_config", image_mean=ONE)
        write(tmp_path, "video_preprocessor_config", image_mean=TWO)
        write(tmp_path, "processor_config", image_processor={"image_mean": THREE})
        assert self.means(tmp_path) == (THREE, TWO)
        theirs = transformers.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
        assert list(theirs.image_mean) == THREE
        write(tmp_path, "processor_config", image_processor={"image_mean": THREE}, video_processor={})
        assert self.means(tmp_path) == (THREE, list(CLIP[0]))

    def test_without_files_as_trained(self, tmp_path: Path) -> None:
        found = PixelSpec.from_directory(tmp_path, "image", HALF)
        assert (found.scale, found.mean, found.std) == (1 / 255, *HALF)

    def test_what_is_switched_off(self, tmp_path: Path) -> None:
        write(tmp_path, "preprocessor_config", do_rescale=False, do_normalize=False, image_mean=ONE)
        found = PixelSpec.from_directory(tmp_path, "image", CLIP)
        assert (found.scale, found.mean, found.std) == (1, (0, 0, 0), (1, 1, 1))

    @pytest.mark.parametrize(
        ("values", "key"),
        [
            ({"image_mean": [0.5, 0.5]}, "image_mean"),
            ({"image_mean": "grey"}, "image_mean"),
            ({"image_std": [0.5, 0, 0.5]}, "image_std"),
            ({"rescale_factor": 0}, "rescale_factor"),
            ({"do_rescale": "yes"}, "do_rescale"),
        ],
        ids=str,
    )
    def test_errors_name_file_and_key(self, tmp_path: Path, values: dict[str, Any], key: str) -> None:
        write(tmp_path, "preprocessor_config", **values)
        with pytest.raises(ModelError, match=rf"preprocessor_config\.json\.{key} must be"):
            PixelSpec.from_directory(tmp_path, "image", CLIP)
