"""What transformers answers to prompts with media, in float32 and greedily."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.conformance.vl_checkpoints import IMAGE_PAD, VIDEO_PAD
from pegboard.plugins.media.api import MediaContext, MediaItem, MediaShape, MediaSource
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from pegboard.toolkit.model.model_config import read_model_config

EOS = 2
"""Of the tiny checkpoints."""


@dataclass(frozen=True)
class VLAnswer:
    """Greedy tokens but the one that ends an answer, the logprob of each, and by how much it was ahead of the next."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class VLReference:
    """transformers' model of a checkpoint. Prompts are laid out by the processor, which has tests of its own."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        options = QwenVLProcessorOptions(mrope_after_video="transformers")
        self.processor = QwenVLProcessor(options, MediaContext(directory, read_model_config(directory)))
        self._vision = self.model.config.vision_config

    def answer(self, prompt: MediaPrompt | str, tokens: int, scratch: Path) -> VLAnswer:
        """Answer with so many tokens, whatever they are."""
        media = prompt.media if isinstance(prompt, MediaPrompt) else ()
        base = prompt.base if isinstance(prompt, MediaPrompt) else prompt
        assert isinstance(base, str)
        prepared = [self._prepared(one, scratch) for one in media]
        encode = self._encode
        items = [
            MediaItem(one.kind, bytes(32), "", shape.shape, shape.grid, shape.pieces, shape.times)
            for one, (shape, _) in zip(media, prepared, strict=True)
        ]
        ids = torch.from_numpy(self.processor.lay_out(encode(base), items, encode).ids)[None]
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                suppress_tokens=[EOS],
                output_logits=True,
                return_dict_in_generate=True,
                **self._inputs(ids, items, [pixels for _, pixels in prepared]),
            )
        answer: list[int] = out.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(out.logits)
        logits[:, EOS] = -torch.inf
        top = logits.topk(2).values
        logprobs = logits.log_softmax(-1)[range(len(answer)), answer]
        return VLAnswer(answer, logprobs.tolist(), (top[:, 0] - top[:, 1]).tolist())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _prepared(self, media: MediaInput, scratch: Path) -> tuple[MediaShape, NDArray[np.uint8]]:
        file, out = scratch / "received", io.BytesIO()
        file.write_bytes(media.data)
        shape = self.processor.prepare(MediaSource(media.kind, file, media.settings), out)
        return shape, np.frombuffer(out.getvalue(), np.uint8).reshape(shape.shape)

    def _inputs(
        self, ids: torch.Tensor, items: Sequence[MediaItem], pixels: Sequence[NDArray[np.uint8]]
    ) -> dict[str, Any]:
        kinds = (ids == IMAGE_PAD).int() + 2 * (ids == VIDEO_PAD).int()
        found: dict[str, Any] = {"mm_token_type_ids": kinds} if items else {}
        for kind, name, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            mine = [(item, one) for item, one in zip(items, pixels, strict=True) if item.kind == kind]
            if mine:
                found[name] = torch.cat([self._patches(one) for _, one in mine])
                found[grid] = torch.tensor([item.grid for item, _ in mine])
        seconds = [item.times[0] for item in items if item.kind == "video" and len(item.times) == 1]
        if seconds and self.model.config.model_type == "qwen2_5_vl":
            found["second_per_grid_ts"] = torch.tensor(seconds)
        return found

    def _patches(self, frames: NDArray[np.uint8]) -> torch.Tensor:
        """Patches float32 [patches, 3 * frames * patch * patch] as transformers' processors make them."""
        vision = self._vision
        patch, merge, pair = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        if frames.shape[0] % pair:
            frames = np.repeat(frames, pair, axis=0)
        qwen3 = self.model.config.model_type.startswith("qwen3")
        mean = [0.5] * 3 if qwen3 else [0.48145466, 0.4578275, 0.40821073]
        deviation = [0.5] * 3 if qwen3 else [0.26862954, 0.26130258, 0.27577711]
        values = (torch.from_numpy(frames.copy()).float() / 255 - torch.tensor(mean)) / torch.tensor(deviation)
        time, height, width, _ = values.shape
        blocks = values.reshape(
            time // pair, pair, height // (merge * patch), merge, patch, width // (merge * patch), merge, patch, 3
        )
        return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * pair * patch * patch)
