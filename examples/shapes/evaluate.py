"""Ask the model about pictures that it has never seen, through transformers, greedily in bfloat16.

    python -m examples.shapes.evaluate [MODEL] [--pictures 300] [--seed 1] [--shuffled]

Prints the share of exact answers by what was asked for. With `--shuffled`, each question comes with the picture of
another one: what is right then is chance. Each picture goes through the bytes of a PNG file.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from examples.shapes.chats import QUESTIONS, Message, answer, question
from examples.shapes.files import MODEL
from examples.shapes.pictures import Scene, draw, png, random_scene

Ask = Callable[[list[Message], list[bytes]], str]
"""Answers a chat, whose pictures are the bytes of image files."""


class Model:
    """The model of a directory, and what prepares its input."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.inference_mode()
    def ask(self, messages: list[Message], pictures: list[bytes]) -> str:
        """Return the answer to a chat, whose pictures are the bytes of image files."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found: dict[str, torch.Tensor] = {}
        if pictures:
            images = [Image.open(io.BytesIO(one)) for one in pictures]
            found = dict(self.processor(images, return_tensors="pt"))
            first, *rest = text.split("<|image_pad|>")
            counts = (found["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist()
            text = first + "".join("<|image_pad|>" * n + part for n, part in zip(counts, rest, strict=True))
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        kinds = (ids == self.model.config.image_token_id).int()
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, max_new_tokens=12, **found
        )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def fresh(count: int, seed: int = 1) -> list[Scene]:
    """Return scenes that training never draws: its seeds begin with another word."""
    rng = random.Random(f"fresh {seed}")
    return [random_scene(rng) for _ in range(count)]


def shares(
    ask: Ask, scenes: list[Scene], seed: int = 1, shuffled: bool = False, kinds: Iterable[str] = tuple(QUESTIONS)
) -> dict[str, float]:
    """Return the share of exact answers to each kind of question, each asked once about each scene."""
    rng = random.Random(f"questions {seed}")
    shown = [png(draw(scene)) for scene in scenes]
    if shuffled:
        rng.shuffle(shown)
    right = dict.fromkeys(kinds, 0)
    for scene, picture in zip(scenes, shown, strict=True):
        for kind in right:
            said = ask([question(rng.choice(QUESTIONS[kind]), 1)], [picture])
            right[kind] += said == answer(kind, scene)
    return {kind: count / len(scenes) for kind, count in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shuffled", action="store_true")
    args = parser.parse_args()
    found = shares(Model(args.model).ask, fresh(args.pictures, args.seed), args.seed, args.shuffled)
    for kind, share in found.items():
        print(f"{kind}: {share:.1%} of {args.pictures}")


if __name__ == "__main__":
    main()
