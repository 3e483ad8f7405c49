"""What the model sees: chats as token ids, pictures as patches, both as a server prepares them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from examples.shapes.chats import Chat, random_chat
from examples.shapes.files import HERE, PATCH, SPECIAL, image_settings
from examples.shapes.pictures import SIZES, draw, random_scene

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MERGE = 2
IGNORED = -100


@dataclass(slots=True)
class Batch:
    """Arguments of the model's forward pass, and the ids to be learned (IGNORED for all but answers)."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None


def patches(picture: Image.Image, settings: dict[str, object] | None = None) -> tuple[NDArray[np.float32], list[int]]:
    """Return a picture's patches, float32 [patches, 1536], and its grid: what Qwen2VLImageProcessorPil makes of it."""
    size = (settings or image_settings())["size"]
    assert isinstance(size, dict)
    height, width = smart_resize(
        picture.height, picture.width, PATCH * MERGE, size["shortest_edge"], size["longest_edge"]
    )
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    rows, columns = height // PATCH, width // PATCH
    shape = (rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    found = ((pixels - 0.5) / 0.5).reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
    twice = np.repeat(found[:, :, :, :, :, None], 2, axis=5)  # both frames of a temporal patch
    return np.ascontiguousarray(twice.reshape(rows * columns, -1)), [1, rows, columns]


class Prompts:
    """Turns chats into token ids by the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ImmutableSandboxedEnvironment().from_string((HERE / "chat_template.jinja").read_text("utf-8"))
        self._id = {token: tokenizer.token_to_id(token) for token in (*SPECIAL, "assistant")}

    def ids(self, chat: Chat, grids: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the ids of the whole chat, with as many image tokens as each grid asks for."""
        first, *rest = self._template.render(messages=chat.messages).split("<|image_pad|>")
        counts = [grid[1] * grid[2] // MERGE**2 for grid in grids]
        text = first + "".join("<|image_pad|>" * n + part for n, part in zip(counts, rest, strict=True))
        return np.array(self._tokenizer.encode(text).ids, np.int64)

    def labels(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of answers and of the tokens that end them, and IGNORED elsewhere."""
        start, end, role = self._id["<|im_start|>"], self._id["<|im_end|>"], self._id["assistant"]
        found = np.full_like(ids, IGNORED)
        for begin in np.flatnonzero((ids[:-1] == start) & (ids[1:] == role)) + 3:
            stop = begin + int(np.argmax(ids[begin:] == end)) + 1
            found[begin:stop] = ids[begin:stop]
        return found

    def positions(self, ids: NDArray[np.int64], grids: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the positions, int64 [3, tokens], as `Qwen3VLModel.get_rope_index` has them.

        All three go on by one from token to token of text. A picture's tokens share the first one, and have rows and
        columns on the others; the text after it goes on at the longer side.
        """
        parts: list[NDArray[np.int64]] = []
        at = place = 0
        pictures = np.flatnonzero(ids == self._id["<|image_pad|>"])
        for grid in [*grids, None]:
            begin = int(pictures[0]) if grid else len(ids)
            parts.append(np.tile(np.arange(place, place + begin - at), (3, 1)))
            if grid:
                rows, columns = grid[1] // MERGE, grid[2] // MERGE
                parts.append(np.indices((1, rows, columns)).reshape(3, -1) + place + begin - at)
                place += begin - at + max(rows, columns)
                at, pictures = begin + rows * columns, pictures[rows * columns :]
        return np.concatenate(parts, axis=1)


def random_batch(seed: str, prompts: Prompts, rows: int) -> Batch:
    """Return the batch of this seed: chats with as many turns and pictures as each other, pictures of about one size.

    So rows need little padding, and pictures become grids of equal size.
    """
    rng = random.Random(seed)
    size, turns, pictures = rng.choice(SIZES), rng.choice((1, 1, 2, 3, 5)), 2 if rng.random() < 0.15 else 1
    chats = []
    for _ in range(rows):
        count = pictures if rng.random() < 0.98 else 0
        chats.append(random_chat(rng, [random_scene(rng, size) for _ in range(count)], turns))
    return collate(chats, prompts)


def collate(chats: Sequence[Chat], prompts: Prompts) -> Batch:
    """Return the chats as one batch, padded at the right."""
    drawn = [[patches(draw(scene)) for scene in chat.scenes] for chat in chats]
    ids = [prompts.ids(chat, [grid for _, grid in one]) for chat, one in zip(chats, drawn, strict=True)]
    padded = torch.zeros((len(ids), max(map(len, ids))), dtype=torch.int64)
    labels = torch.full_like(padded, IGNORED)
    positions = torch.zeros((3, *padded.shape), dtype=torch.int64)
    for row, one in enumerate(ids):
        padded[row, : len(one)] = torch.from_numpy(one)
        labels[row, : len(one)] = torch.from_numpy(prompts.labels(one))
        positions[:, row, : len(one)] = torch.from_numpy(prompts.positions(one, [grid for _, grid in drawn[row]]))
    pictures = [one for row in drawn for one in row]
    if not pictures:
        return Batch(padded, positions, labels)
    values = torch.from_numpy(np.concatenate([values for values, _ in pictures]))
    return Batch(padded, positions, labels, values, torch.tensor([grid for _, grid in pictures]))
