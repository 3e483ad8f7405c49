"""The towers say what transformers' say, for all four families."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pegboard.conformance.vl_checkpoints import VL_FAMILIES, vl_checkpoint
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaItem, MediaPiece
from pegboard.plugins.media.suite.media_encoder import pieces_of
from pegboard.plugins.mm_qwen_vl.encoder import QwenVLEncoder
from pegboard.plugins.mm_qwen_vl.patches import patches_of
from pegboard.plugins.mm_qwen_vl.pixel_spec import PixelSpec
from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec
from pegboard.plugins.quantization.api import FormatContext, LinearContext
from pegboard.plugins.quantization.formats.fp8 import Fp8
from pegboard.plugins.quantization.torch_products import TorchProducts
from pegboard.toolkit.model.coded import SERVICE, QuantizedWeights, slots_of
from tests.plugins.mm_qwen_vl.models import NORMALISED
from tests.plugins.mm_qwen_vl.vision_cases import (
    CPU,
    context,
    difference,
    encoded,
    expected,
    image,
    loaded,
    reference,
    video,
    with_pixels,
)
from tests.plugins.quantization.published import WRITERS, published

TOLERANCE = 1e-4
"""Of states about 1 large, in float32. Sums in another order make about 5e-6."""

PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}

# Windows of Qwen2.5-VL are 8 patches wide here, and learned positions of Qwen3-VL 16 by 16.
SOME_GRIDS = [(2, 2), (2, 40), (18, 6), (8, 16), (22, 30)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "media_encoder"


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_equals_transformers(family: str, checkpoints: Path) -> None:
    """Pictures and videos of several temporal patches, in one list, against one call of transformers."""
    directory, patch = vl_checkpoint(checkpoints, family), PATCH[family]
    items = [image(patch, *grid) for grid in SOME_GRIDS]
    items[2:2] = [video(patch, 3, 4, 10), video(patch, 1, 2, 2)]
    cases = with_pixels(items)
    assert difference(encoded(loaded(directory), cases), expected(reference(directory), cases)) < TOLERANCE


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_faint_pictures(family: str, checkpoints: Path) -> None:
    """Where patches are nearly nothing, the small constant in the norms shows."""
    directory, item = vl_checkpoint(checkpoints, family), image(PATCH[family], 4, 8)
    pixels = np.empty(item.shape, np.uint8)
    pixels[:] = (125, 119, 106) if PATCH[family] == 14 else (129, 128, 127)
    cases = [(item, pixels)]
    assert difference(encoded(loaded(directory), cases), expected(reference(directory), cases)) < TOLERANCE


def random_items(patch: int, seed: int) -> list[MediaItem]:
    draw = random.Random(seed)
    items = [image(patch, 2, 200), image(patch, 150, 2), image(patch, 48, 64)]
    for _ in range(20):
        rows, columns = (min(2 * max(1, round(draw.lognormvariate(1.5, 1))), 40) for _ in range(2))
        items += [image(patch, rows, columns), video(patch, draw.randint(1, 4), 6, columns)]
    return items


@pytest.mark.parametrize("names", ["new", "hub", "old"])
@pytest.mark.parametrize("family", VL_FAMILIES)
def test_many_sizes_and_all_spellings(family: str, names: Any, checkpoints: Path) -> None:
    """The same weights in every spelling, over 43 items of up to 3,072 patches a piece."""
    model = reference(vl_checkpoint(checkpoints, family))
    encoder = loaded(vl_checkpoint(checkpoints, family, names=names, max_shard_size="300KB"))
    for case in with_pixels(random_items(PATCH[family], len(names))):
        assert difference(encoded(encoder, [case]), expected(model, [case])) < TOLERANCE, case[0].grid


TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks-of-nine": ("qwen2_vl", {"spatial_merge_size": 3, "num_heads": 2}),
    "blocks-of-one": ("qwen2_5_vl", {"spatial_merge_size": 1, "window_size": 42}),
    "one-frame": ("qwen2_vl", {"temporal_patch_size": 1, "hidden_act": "gelu", "mlp_ratio": 3}),
    "no-layer-sees-all": ("qwen2_5_vl", {"fullatt_block_indexes": [], "depth": 3}),
    "all-layers-see-all": ("qwen2_5_vl", {"fullatt_block_indexes": [0, 1], "window_size": 56}),
    "levels-out-of-order": ("qwen3_vl", {"depth": 4, "deepstack_visual_indexes": [3, 0, 2]}),
    "one-level": ("qwen3_vl_moe", {"deepstack_visual_indexes": [1], "num_position_embeddings": 50}),
    "no-level": ("qwen3_vl", {"deepstack_visual_indexes": [], "num_position_embeddings": 4}),
    "another-rope": ("qwen3_vl", {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}),
}


@pytest.mark.parametrize("tower", TOWERS)
def test_other_towers(tower: str, checkpoints: Path) -> None:
    """What a config may say, it may say otherwise."""
    family, vision = TOWERS[tower]
    directory = vl_checkpoint(checkpoints, family, vision=vision)
    temporal, merge = vision.get("temporal_patch_size", 2), vision.get("spatial_merge_size", 2)
    grids = [(merge, merge), (6 * merge, 3 * merge), (5 * merge, 7 * merge)]
    items = [image(PATCH[family], *grid) for grid in grids] + [video(PATCH[family], 2, *grids[1], temporal)]
    cases, encoder = with_pixels(items), loaded(directory)
    assert encoder.levels == len(vision.get("deepstack_visual_indexes", [0, 1] if "qwen3" in family else []))
    assert difference(encoded(encoder, cases), expected(reference(directory), cases)) < TOLERANCE


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_every_weight_counts(family: str, checkpoints: Path, tmp_path: Path) -> None:
    """No tensor of the tower could be left out unseen by the comparisons above."""
    directory = vl_checkpoint(checkpoints, family)
    tensors, cases = load_file(directory / "model.safetensors"), with_pixels([image(PATCH[family], 10, 6)])
    before = encoded(loaded(directory), cases)
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    names = [name for name in tensors if name.startswith("model.visual.")]
    assert len(names) >= 30
    for name in names:
        changed = tensors[name] + 0.05 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
        save_file({**tensors, name: changed}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert difference(encoded(loaded(tmp_path), cases), before) > 10 * TOLERANCE, name


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_bfloat16_is_as_close_as_transformers_is(family: str, checkpoints: Path) -> None:
    """Norms, rotations and positions are rounded where transformers rounds them."""
    directory, patch = vl_checkpoint(checkpoints, family), PATCH[family]
    cases = with_pixels([image(patch, 10, 24), video(patch, 2, 8, 8)])
    exact = expected(reference(directory), cases)
    theirs = difference(expected(reference(directory, torch.bfloat16), cases), exact)
    found = encoded(loaded(directory, torch.bfloat16), cases)
    assert {states.dtype for states in (found.states, *found.deep)} == {torch.bfloat16}
    assert difference(found, exact) < 1.5 * theirs


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_list_changes_not_one_bit(family: str, checkpoints: Path) -> None:
    encoder, patch = loaded(vl_checkpoint(checkpoints, family)), PATCH[family]
    cases = with_pixels([image(patch, 8, 8), video(patch, 3, 6, 10), image(patch, 2, 2)])
    pieces = [piece for item, pixels in cases for piece in pieces_of(item, pixels)]
    for piece, together in zip(pieces, encoder.encode(pieces), strict=True):
        alone = encoder.encode([piece])[0]
        assert torch.equal(alone.states, together.states)
        assert all(map(torch.equal, alone.deep, together.deep))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_patches_are_those_of_the_image_processor(family: str, checkpoints: Path) -> None:
    directory, patch = vl_checkpoint(checkpoints, family), PATCH[family]
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(directory)
    spec = VisionSpec.from_config(context(directory).hf_config)
    numbers = PixelSpec.from_directory(directory, "image", ((9, 9, 9), (9, 9, 9)))
    for item, pixels in with_pixels([image(patch, 2, 2), image(patch, 12, 6)]):
        made = processor(images=[pixels[0]], do_resize=False, return_tensors="pt")
        assert made["image_grid_thw"].tolist() == [list(item.grid)]
        found = patches_of(spec, numbers, MediaPiece(item, 0, pixels), item.grid[1:], CPU)
        torch.testing.assert_close(found, made["pixel_values"], rtol=0, atol=NORMALISED)


def test_pixels_that_are_not_the_items_are_refused(checkpoints: Path) -> None:
    encoder = loaded(vl_checkpoint(checkpoints, "qwen2_vl"))
    item, pixels = with_pixels([image(14, 4, 2)])[0]
    wrongs: tuple[Any, ...] = (pixels[:, :28], pixels.astype(np.float32), pixels[0], np.repeat(pixels, 2, 0))
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"the item says uint8 \[1, 56, 28, 3\]"):
            encoder.encode([MediaPiece(item, 0, wrong)])


def test_weights_that_a_tower_does_not_know_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    directory = vl_checkpoint(checkpoints, "qwen2_vl")
    tensors = load_file(directory / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())

    def error(**more: torch.Tensor) -> str:
        save_file({**tensors, **more}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError) as raised:
            loaded(tmp_path)
        return str(raised.value)

    assert "model.visual.blocks.2.norm1.weight [64] has no place" in error(
        **{"model.visual.blocks.2.norm1.weight": torch.ones(64)}
    )
    tensors = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    assert "has no vision weights" in error()


def test_quantised_towers_are_those_of_their_exact_weights(checkpoints: Path, tmp_path: Path) -> None:
    """Bit by bit: the gated MLPs of Qwen2.5-VL's tower are quantised with the rest of the model."""
    coded, meant = published(tmp_path / "written", vl_checkpoint(checkpoints, "qwen2_5_vl"), WRITERS["fp8 blocks"])
    slots, config = slots_of(coded), json.loads((coded / "config.json").read_text("utf-8"))
    assert slots["model.visual.blocks.0.mlp.up_proj.weight"].dtype is torch.float8_e4m3fn
    made = Fp8(NoOptions(), FormatContext(config["quantization_config"], slots))
    linears = TorchProducts(NoOptions(), LinearContext(CPU, torch.float32))
    services = {SERVICE: QuantizedWeights(made.matrices(), made.unused(), slots, linears)}
    encoder = QwenVLEncoder(NoOptions(), dataclasses.replace(context(coded), services=services))
    encoder.load()
    cases = with_pixels([image(14, 10, 6), video(14, 2, 4, 4)])
    assert difference(encoded(encoder, cases), encoded(loaded(meant), cases)) == 0


def test_load_comes_first(checkpoints: Path) -> None:
    encoder = QwenVLEncoder(NoOptions(), context(vl_checkpoint(checkpoints, "qwen2_vl")))
    with pytest.raises(RuntimeError, match=r"load\(\)"):
        encoder.encode([])


MEMORY = """
import json, resource, sys
from pathlib import Path
import numpy as np, torch
from pegboard.plugins.media.api import MediaItem, MediaPiece
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.mm_qwen_vl.encoder import QwenVLEncoder

directory, patch = Path(sys.argv[1]), int(sys.argv[2])
config = json.loads((directory / "config.json").read_text())
encoder = QwenVLEncoder(NoOptions(), ModelContext(directory, config, torch.float32, torch.device("cpu")))
encoder.load()

def peak(rows, columns):
    pixels = np.full((1, rows * patch, columns * patch, 3), 100, np.uint8)
    item = MediaItem(kind="image", digest=b"", file="", shape=pixels.shape, grid=(1, rows, columns))
    encoder.encode([MediaPiece(item, 0, pixels)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small = peak(16, 16)
print((peak(64, 96) - small) // 1024)
"""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_memory_grows_with_the_piece_and_not_with_its_square(family: str, checkpoints: Path) -> None:
    """6,144 patches are 38 MB of float32. A matrix of all their pairs has 151 MB, for each of four heads."""
    command = [sys.executable, "-c", MEMORY, str(vl_checkpoint(checkpoints, family)), str(PATCH[family])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 140
