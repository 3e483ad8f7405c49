"""What tests of the towers share: an encoder for a checkpoint, items with pixels, and transformers' answers to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaItem, MediaStates
from pegboard.plugins.media.suite.media_encoder import pieces_of
from pegboard.plugins.mm_qwen_vl.encoder import QwenVLEncoder

Pixels = NDArray[np.uint8]

CPU = torch.device("cpu")


def image(patch: int, rows: int, columns: int) -> MediaItem:
    """A picture of rows by columns patches."""
    shape = (1, rows * patch, columns * patch, 3)
    return MediaItem(kind="image", digest=b"", file="", shape=shape, grid=(1, rows, columns))


def video(patch: int, time: int, rows: int, columns: int, temporal: int = 2) -> MediaItem:
    """A video of `time` temporal patches."""
    shape = (temporal * time, rows * patch, columns * patch, 3)
    return MediaItem(kind="video", digest=b"", file="", shape=shape, grid=(time, rows, columns), pieces=time)


def context(directory: Path, dtype: torch.dtype = torch.float32) -> ModelContext:
    return ModelContext(directory, json.loads((directory / "config.json").read_text("utf-8")), dtype, CPU)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> QwenVLEncoder:
    encoder = QwenVLEncoder(NoOptions(), context(directory, dtype))
    encoder.load()
    return encoder


def with_pixels(items: Sequence[MediaItem], seed: int = 0) -> list[tuple[MediaItem, Pixels]]:
    """Items with pixels: smooth ones with noise, since noise alone has the same mean everywhere."""
    draw = np.random.default_rng(seed)
    found = []
    for item in items:
        coarse = draw.integers(0, 256, (*(-(-size // 20) for size in item.shape[:3]), 3))
        smooth = coarse.repeat(20, 0).repeat(20, 1).repeat(20, 2)[tuple(slice(size) for size in item.shape)]
        noise = draw.integers(-30, 31, item.shape)
        found.append((item, (smooth + noise).clip(0, 255).astype(np.uint8)))
    return found


def encoded(encoder: QwenVLEncoder, cases: Sequence[tuple[MediaItem, Pixels]]) -> MediaStates:
    """The states of all pieces of all items, one after the other, from one call."""
    answers = encoder.encode([piece for item, pixels in cases for piece in pieces_of(item, pixels)])
    return joined(answers)


def joined(answers: Sequence[MediaStates]) -> MediaStates:
    levels = zip(*(answer.deep for answer in answers), strict=True)
    return MediaStates(torch.cat([answer.states for answer in answers]), tuple(map(torch.cat, levels)))


@lru_cache(maxsize=16)
def reference(directory: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype).eval()


def expected(model: transformers.PreTrainedModel, cases: Sequence[tuple[MediaItem, Pixels]]) -> MediaStates:
    """What transformers answers to all items in one call, as its processors would have patched them."""
    vision = model.config.vision_config
    patches = [
        plain_patches(pixels, vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, clip)
        for clip in ("qwen3" not in model.config.model_type,)
        for _, pixels in cases
    ]
    grid = torch.tensor([item.grid for item, _ in cases])
    with torch.inference_mode():
        out = model.model.visual(torch.from_numpy(np.concatenate(patches)), grid_thw=grid)
    return MediaStates(out.pooler_output, tuple(getattr(out, "deepstack_features", None) or ()))


def plain_patches(pixels: Pixels, patch: int, temporal: int, merge: int, clip: bool) -> NDArray[np.float32]:
    """Patches float32 [patches, values] as the processors of images and videos make them, said once more in numpy."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073] if clip else [0.5] * 3)
    std = np.array([0.26862954, 0.26130258, 0.27577711] if clip else [0.5] * 3)
    frames = ((pixels / 255 - mean) / std).astype(np.float32).transpose(0, 3, 1, 2)
    if len(frames) == 1:
        frames = frames.repeat(temporal, 0)
    time, rows, columns = len(frames) // temporal, frames.shape[2] // patch, frames.shape[3] // patch
    parts = (time, temporal, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    patches = frames.reshape(parts).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(patches.reshape(time * rows * columns, -1))


def difference(found: MediaStates, wanted: MediaStates) -> float:
    """Largest difference of states and of any deep level."""
    assert len(found.deep) == len(wanted.deep)
    pairs = zip((found.states, *found.deep), (wanted.states, *wanted.deep), strict=True)
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
