"""Prompts with media: ids as transformers' processors write them, positions as its models or the training have them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaItem, MediaLayout
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import MediaKind
from tests.plugins.mm_qwen_vl.models import IDS, processor

LAYOUTS = 300
FEW = 25
FAMILIES = ("qwen2", "qwen2_5", "qwen3", "qwen3_moe")
IMAGE, VIDEO, START, END = (IDS[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end"))
TOKENS_PER_SECOND = 2


def encode(text: str) -> list[int]:
    return [1000 + ord(char) for char in text]


def item(kind: MediaKind, grid: tuple[int, int, int], times: tuple[float, ...] = ()) -> MediaItem:
    pieces = grid[0] if kind == "video" else 1
    return MediaItem(kind, bytes(32), "x", (2 * grid[0], 14 * grid[1], 14 * grid[2], 3), grid, pieces, times)


def random_item(rng: random.Random, family: str) -> MediaItem:
    height, width = rng.randint(1, 9) * 2, rng.randint(1, 9) * 2
    if rng.random() < 0.5:
        return item("image", (1, height, width))
    patches = rng.randint(1, 12)
    rate = rng.choice((2.0, 1.0, 0.5, rng.uniform(0.3, 4)))
    times: tuple[float, ...] = ()
    if family == "qwen2_5":
        times = (2 / rate,)
    elif family.startswith("qwen3"):
        times = tuple((2 * i + 0.5) / rate for i in range(patches))
    return item("video", (patches, height, width), times)


Segment = tuple[list[int], MediaItem | None]
"""Text, and the item after it."""


def random_layout(seed: int, family: str) -> list[Segment]:
    rng = random.Random(f"{seed} {family}")
    found: list[Segment] = []
    for _ in range(rng.randint(0, 5)):
        text = [rng.randrange(1000) for _ in range(rng.choice((0, 1, rng.randint(0, 40))))]
        found.append(([*text, START], random_item(rng, family)))
    return [*found, ([END, *(rng.randrange(1000) for _ in range(rng.randint(0, 30)))], None)]


def laid_out(made: QwenVLProcessor, segments: Sequence[Segment]) -> MediaLayout:
    ids: list[int] = []
    for text, one in segments:
        ids += text
        if one is not None:
            ids.append(VIDEO if one.kind == "video" else IMAGE)
    return made.lay_out(ids, [one for _, one in segments if one is not None], encode)


def expanded(segments: Sequence[Segment], family: str) -> list[int]:
    """The ids that transformers' processors write: the placeholder repeated, or a Qwen3-VL video taken apart."""
    ids: list[int] = []
    for text, one in segments:
        ids += text
        if one is None:
            continue
        token = VIDEO if one.kind == "video" else IMAGE
        count = one.grid[1] * one.grid[2] // 4
        if one.kind == "video" and family.startswith("qwen3"):
            for seconds in one.times:
                ids += [*encode(f"<{seconds:.1f} seconds>"), START, *[token] * count, END]
        else:
            ids += [token] * (one.grid[0] * count)
    return ids


@cache
def rope_index(family: str) -> Any:
    """`get_rope_index` of a tiny model of transformers."""
    import transformers

    names = {"qwen2": "Qwen2VL", "qwen2_5": "Qwen2_5_VL", "qwen3": "Qwen3VL", "qwen3_moe": "Qwen3VLMoe"}
    text: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    if not family.startswith("qwen3"):
        del text["head_dim"]
    if family == "qwen3_moe":
        text.update(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "spatial_merge_size": 2}
    if family == "qwen2":
        vision.update(embed_dim=32, mlp_ratio=1)
    else:
        vision.update(intermediate_size=32, out_hidden_size=32)
    if family == "qwen2_5":
        vision.update(tokens_per_second=TOKENS_PER_SECOND, fullatt_block_indexes=[0])
    if family.startswith("qwen3"):
        vision.update(num_position_embeddings=16, deepstack_visual_indexes=[0])
    config = getattr(transformers, f"{names[family]}Config")(text_config=text, vision_config=vision, **IDS)
    return getattr(transformers, f"{names[family]}Model")(config).get_rope_index


def of_transformers(segments: Sequence[Segment], family: str) -> tuple[NDArray[Any], int]:
    """Positions [3, length] and delta that transformers computes of a laid out prompt."""
    ids = torch.tensor([expanded(segments, family)])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    items = [one for _, one in segments if one is not None]
    grids = {kind: [one.grid for one in items if one.kind == kind] for kind in ("image", "video")}
    more: dict[str, Any] = {f"{kind}_grid_thw": torch.tensor(found) if found else None for kind, found in grids.items()}
    if family == "qwen2_5":
        seconds = [one.times[0] for one in items if one.kind == "video"]
        more["second_per_grid_ts"] = torch.tensor(seconds) if seconds else None
    positions, delta = rope_index(family)(ids, kinds, **more)
    return positions[:, 0].numpy(), int(delta[0, 0])


def as_trained(segments: Sequence[Segment], family: str) -> tuple[list[list[int]], int]:
    """The rule in words: whatever comes next stands at the largest position so far and one more."""
    columns: list[tuple[int, int, int]] = []
    largest = -1

    def add(*more: tuple[int, int, int]) -> None:
        nonlocal largest
        columns.extend(more)
        largest = max(largest, *(max(one) for one in more))

    def text(count: int) -> None:
        for _ in range(count):
            add((largest + 1,) * 3)

    def patches(grid: tuple[int, int, int], interval: float) -> None:
        at, (times, height, width) = largest + 1, grid
        add(
            *(
                (at + int(np.float32(t) * np.float32(interval)), at + row, at + column)
                for t in range(times)
                for row in range(height // 2)
                for column in range(width // 2)
            )
        )

    for words, one in segments:
        text(len(words))
        if one is None:
            continue
        if one.kind == "video" and family.startswith("qwen3"):
            for seconds in one.times:
                text(len(f"<{seconds:.1f} seconds>") + 1)
                patches((1, *one.grid[1:]), 1)
                text(1)
        else:
            slow = one.kind == "video" and family == "qwen2_5"
            patches(one.grid, float(np.float32(one.times[0]) * np.float32(TOKENS_PER_SECOND)) if slow else 1)
    return [list(row) for row in zip(*columns, strict=True)], largest + 1 - len(columns)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n == 0 else pytest.mark.full) for n in range(0, LAYOUTS, FEW)]
)
class TestPositions:
    def test_those_of_transformers(self, tmp_path: Path, family: str, first: int) -> None:
        made = processor(tmp_path, family, mrope_after_video="transformers")
        for seed in range(first, first + FEW):
            segments = random_layout(seed, family)
            layout = laid_out(made, segments)
            positions, delta = of_transformers(segments, family)
            assert layout.ids.tolist() == expanded(segments, family)
            assert np.array_equal(layout.positions, positions)
            assert layout.delta == delta

    def test_those_of_the_training(self, tmp_path: Path, family: str, first: int) -> None:
        made = processor(tmp_path, family)
        for seed in range(first, first + FEW):
            segments = random_layout(seed, family)
            layout = laid_out(made, segments)
            assert layout.ids.tolist() == expanded(segments, family)
            assert (layout.positions.tolist(), layout.delta) == as_trained(segments, family)


def test_the_rules_differ_after_long_videos_only(tmp_path: Path) -> None:
    """Of 12 temporal patches, 4 tokens wide."""
    long: list[Segment] = [([1, START], item("video", (12, 4, 8), (1.0,))), ([END, 2], None)]
    trained, late = (
        laid_out(processor(tmp_path, "qwen2_5", mrope_after_video=rule), long) for rule in ("trained", "transformers")
    )
    assert trained.positions[0, -2:].tolist() == [2 + 23, 2 + 24]
    assert late.positions[0, -2:].tolist() == [2 + 4, 2 + 5]
    assert np.array_equal(trained.positions[:, :-2], late.positions[:, :-2])


def test_spans_are_temporal_patches(tmp_path: Path) -> None:
    items = (item("image", (1, 4, 6)), item("video", (3, 2, 4), (0.5, 1.5, 2.5)))
    layout = laid_out(processor(tmp_path, "qwen3"), [([1], items[0]), ([2], items[1]), ([3], None)])
    assert [(one.item, one.piece, one.count) for one in layout.spans] == [(0, 0, 6), (1, 0, 2), (1, 1, 2), (1, 2, 2)]
    for one in layout.spans:
        assert set(layout.ids[one.start : one.start + one.count].tolist()) == {VIDEO if one.item else IMAGE}


class TestMismatches:
    def refused(self, made: QwenVLProcessor, ids: list[int], items: list[MediaItem]) -> str:
        with pytest.raises(InvalidRequest) as caught:
            made.lay_out(ids, items, encode)
        return caught.value.message

    def test_they_say_how_many_of_each(self, tmp_path: Path) -> None:
        made = processor(tmp_path, "qwen2")
        image, video = item("image", (1, 2, 2)), item("video", (1, 2, 2))
        assert self.refused(made, [5, IMAGE], [image, video]) == (
            "the prompt has placeholders for 1 image and 0 videos, but 1 image and 1 video came with it"
        )
        assert self.refused(made, [IMAGE, VIDEO], [video, image]).endswith(
            "1 image and 1 video came with it, in another order"
        )
        assert "0 images and 0 videos came" in self.refused(made, [IMAGE], [])

    @pytest.mark.parametrize(
        ("family", "bad"),
        [
            ("qwen2", item("image", (1, 3, 2))),
            ("qwen2", item("image", (2, 2, 2))),
            ("qwen2", item("video", (0, 2, 2))),
            ("qwen2_5", item("video", (2, 2, 2))),
            ("qwen3", item("video", (2, 2, 2), (1.0,))),
            ("qwen3", MediaItem("video", bytes(32), "x", (2, 28, 28, 3), (2, 2, 2), 1, (1.0, 2.0))),
        ],
    )
    def test_a_grid_that_no_item_has(self, tmp_path: Path, family: str, bad: MediaItem) -> None:
        """An item may come from a client, as embeddings do."""
        token = VIDEO if bad.kind == "video" else IMAGE
        assert "item 0 has" in self.refused(processor(tmp_path, family), [token], [bad])
