"""Record what transformers' video processors do: which frames they take, how large they make them, and when they are.

They need torchvision, which has no build for CPUs. Its CUDA wheel imports beside a CPU build of torch once two of its
operators are declared, and nothing here uses them. The recording in this folder was made with transformers 5.23.0,
torch 2.13.0 and torchvision 0.28.0::

    pip install --no-deps --target /tmp/torchvision torchvision==0.28.0
    PYTHONPATH=/tmp/torchvision .venv/bin/python -m tests.plugins.mm_qwen_vl.record_videos
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.plugins.mm_qwen_vl.clips import CLIPS, clip_frames

FILE = Path(__file__).with_name("videos.npz")
CASES = 500
RATES = (10.0, 12.5, 24000 / 1001, 24.0, 25.0, 30000 / 1001, 30.0, 50.0, 60.0)
LONGEST = 12_000
"""Frames. In longer videos transformers' float32 indices of Qwen2-VL depend on the width of the CPU's vectors."""


def sampling_case(rng: random.Random) -> tuple[int, float, float, int]:
    """A video's frames and rate, and what is asked for: frames per second, or a number of frames; 0 says nothing."""
    total = rng.choice((rng.randint(2, 40), rng.randint(2, 1000), rng.randint(2, LONGEST)))
    rate = rng.choice((*RATES, rng.uniform(0.5, 120)))
    how = rng.random()
    if how < 0.6:
        return total, rate, 0.0, 0
    if how < 0.8:
        return total, rate, rng.choice((0.5, 1.0, 2.0, 4.0, rng.uniform(0.05, 10))), 0
    return total, rate, 0.0, rng.randint(2, min(total - total % 2, 768))


def record_sampling(processor: Any, seconds: Any, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    from transformers.video_utils import VideoMetadata

    rng = random.Random(seed)
    cases: list[tuple[int, float, float, int]] = []
    steps, lengths, times = [], [], []
    while len(cases) < CASES:
        total, rate, fps, count = case = sampling_case(rng)
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        default = {} if count else {"fps": fps or 2.0}
        taken = processor.sample_frames(metadata, **default, **({"num_frames": count} if count else {}))
        metadata.frames_indices = taken
        cases.append(case)
        # Differences take a tenth of the space.
        steps.append(np.diff([int(one) for one in taken], prepend=0))
        lengths.append(len(taken))
        times.append(seconds(metadata))
    return {
        "cases": np.array(cases, np.float64),
        "lengths": np.array(lengths, np.int32),
        "steps": np.concatenate(steps).astype(np.int16),
        "times": np.concatenate([np.atleast_1d(one) for one in times]),
    }


def record_sizes(processor: Any, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Sizes come from `resize` itself, on tensors without memory."""
    rng = random.Random(seed)
    cases: list[tuple[int, ...]] = []
    factor = processor.patch_size * processor.merge_size
    while len(cases) < CASES:
        frames = rng.choice((2, 4, rng.randint(2, 30), rng.randint(2, 768)))
        height, width = (round(2 ** rng.uniform(3, 11.5)) for _ in range(2))
        least = rng.choice((processor.size["shortest_edge"], rng.randint(factor**2, 100 * factor**2)))
        most = rng.choice((processor.size["longest_edge"], least * rng.randint(1, 200)))
        cap = rng.random() < 0.3
        tensor = torch.empty(1, frames, 3, height, width, dtype=torch.uint8, device="meta")
        size = SimpleNamespace(shortest_edge=least, longest_edge=most)
        try:
            resized = processor.resize(
                tensor, size, 3, factor=factor, temporal_factor=2, cap_pixels_per_frame=cap
            ).shape[-2:]
        except ValueError:
            resized = (0, 0)
        cases.append((frames, height, width, least, most, int(cap), *resized))
    return {"sizes": np.array(cases, np.int64)}


def record_clips(processor: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A few of the patches that it makes of whole clips."""
    from transformers.video_utils import VideoMetadata

    found = {}
    for name, (frames, rate) in CLIPS.items():
        metadata = VideoMetadata(total_num_frames=frames, fps=rate)
        made = processor(
            [clip_frames(name)], video_metadata=[metadata], do_sample_frames=True, fps=2.0, return_tensors="pt"
        )
        patches = made["pixel_values_videos"].numpy()
        found[f"{name}_grid"] = made["video_grid_thw"][0].numpy()
        found[f"{name}_patches"] = patches[:: max(1, len(patches) // 40), ::7].astype(np.float32)
    return found


def main() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    video = SimpleNamespace(merge_size=2, temporal_patch_size=2)

    def stamps(metadata: Any) -> np.ndarray[Any, Any]:
        """The times in Qwen3-VL's prompt, in tenths of a second, less those before them."""
        pieces = -(-len(metadata.frames_indices) // 2)
        # Made by hand: it cannot be constructed without a tokenizer.
        processor = object.__new__(Qwen3VLProcessor)
        processor.video_processor = video
        processor.vision_start_token = processor.vision_end_token = processor.video_token = ""
        inputs = {"video_grid_thw": np.array([[pieces, 2, 2]]), "video_metadata": [metadata]}
        text = processor.replace_video_token(inputs, 0)
        tenths = [round(float(one) * 10) for one in re.findall(r"<(\d+\.\d) seconds>", text)]
        assert len(tenths) == pieces
        return np.diff(tenths, prepend=0).astype(np.int16)

    def interval(metadata: Any) -> np.ndarray[Any, Any]:
        """Qwen2.5-VL's seconds per grid, as its processor computes them."""
        return np.array([video.temporal_patch_size / metadata.sampled_fps])

    recorded: dict[str, Any] = {}
    for name, processor, seconds, seed in (
        ("qwen2", Qwen2VLVideoProcessor(), interval, 1),
        ("qwen3", Qwen3VLVideoProcessor(), stamps, 2),
    ):
        parts = {
            **record_sampling(processor, seconds, seed),
            **record_sizes(processor, seed),
            **record_clips(processor),
        }
        recorded.update({f"{name}_{key}": value for key, value in parts.items()})
    np.savez_compressed(FILE, **recorded)


if __name__ == "__main__":
    main()
