"""A media encoder that is not a network: blocks of pixels become the colours that they have on average.

For tests that need an encoder and no vision tower. Pictures and frames come in blocks of 8 by 8 pixels, and two frames
of a video make a piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaEncoder, MediaItem, MediaPiece, MediaStates
from pegboard.toolkit.model.weights import check_weights, load_weights

BLOCK = 8
"""Rows and columns of pixels that make a token."""

FRAMES = 2
"""Frames of a piece of a video."""

COLOUR_CONFIG: Mapping[str, Any] = {"architectures": ["ColourChat"], "hidden_size": 12, "colour_levels": 2}


def colour_model(directory: Path) -> Path:
    """Write a model that `ColourEncoder` supports to `directory` and return it: config.json and random weights."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(COLOUR_CONFIG), "utf-8")
    hidden, levels = COLOUR_CONFIG["hidden_size"], COLOUR_CONFIG["colour_levels"]
    draw = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(20, hidden, generator=draw)}
    for level in range(levels + 1):
        tensors[f"colours.{level}.weight"] = torch.randn(hidden, 3, generator=draw)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def colour_items() -> list[MediaItem]:
    """Return two pictures and a video of three pieces, as `ColourEncoder` takes them."""
    return [
        MediaItem(kind="image", digest=b"", file="", shape=(1, BLOCK, BLOCK, 3), grid=(1, 1, 1)),
        MediaItem(kind="image", digest=b"", file="", shape=(1, 2 * BLOCK, 5 * BLOCK, 3), grid=(1, 2, 5)),
        MediaItem(kind="video", digest=b"", file="", shape=(6, 3 * BLOCK, BLOCK, 3), grid=(3, 3, 1), pieces=3),
    ]


class ColourEncoder(MediaEncoder[NoOptions]):
    """Each block of a piece as its mean colour times a matrix; a deep level is the same with a matrix of its own."""

    def __init__(self, options: NoOptions, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        self._levels = int(ctx.hf_config["colour_levels"])
        self._matrices: list[torch.Tensor] = []

    @classmethod
    def supports(cls, options: NoOptions, ctx: ModelContext) -> str | None:
        """Return None for a ColourChat, else its name."""
        return None if ctx.architecture == "ColourChat" else f"{ctx.architecture or 'this'} is not a ColourChat"

    @property
    def levels(self) -> int:
        return self._levels

    def load(self) -> None:
        """Read `colours.*`."""
        size = (int(self.ctx.hf_config["hidden_size"]), 3)
        matrices = [torch.empty(size, dtype=self.ctx.dtype, device=self.ctx.device) for _ in range(self._levels + 1)]
        targets = {f"colours.{level}.weight": matrix for level, matrix in enumerate(matrices)}

        def ignore(name: str) -> bool:
            return not name.startswith("colours.")

        check_weights(self.ctx.directory, targets, ignore=ignore)
        load_weights(self.ctx.directory, targets, ignore=ignore)
        self._matrices = matrices

    def tokens(self, item: MediaItem, piece: int) -> int:
        """Return the number of blocks."""
        pieces, rows, columns = item.grid
        frames = 1 if item.kind == "image" else FRAMES * pieces
        if item.shape != (frames, rows * BLOCK, columns * BLOCK, 3) or min(item.grid) < 1:
            raise ValueError(f"shape {item.shape} does not have the grid {item.grid}")
        if item.pieces != pieces or (item.kind == "image" and pieces != 1) or not 0 <= piece < pieces:
            raise ValueError(f"grid {item.grid} does not have piece {piece} of {item.pieces}")
        return rows * columns

    @torch.inference_mode()
    def encode(self, pieces: Sequence[MediaPiece]) -> list[MediaStates]:
        return [self.encode_one(piece) for piece in pieces]

    def encode_one(self, piece: MediaPiece) -> MediaStates:
        """Encode one piece; for variants to override."""
        count = self.tokens(piece.item, piece.piece)
        _, rows, columns = piece.item.grid
        blocks = piece.pixels.reshape(-1, rows, BLOCK, columns, BLOCK, 3).mean((0, 2, 4), dtype=np.float64)
        colours = torch.from_numpy(blocks.reshape(count, 3) / 255).to(self.ctx.device, self.ctx.dtype)
        states = [colours @ matrix.T for matrix in self._matrices]
        return MediaStates(states[0], tuple(states[1:]))
