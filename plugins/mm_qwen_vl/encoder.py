"""The encoder: which models it takes, how their vision weights are read, and pieces into states."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaEncoder, MediaStates
from pegboard.plugins.mm_qwen_vl.patches import grid_of, patches_of
from pegboard.plugins.mm_qwen_vl.pixel_spec import CLIP, HALF, PixelSpec
from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec
from pegboard.plugins.mm_qwen_vl.vision_tower import VisionTower
from pegboard.toolkit.model.coded import quantized_weights
from pegboard.toolkit.model.packed import why_not_packed
from pegboard.toolkit.model.weights import check_weights, checkpoint_files, load_weights, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.plugins.media.api import MediaItem, MediaPiece
    from pegboard.toolkit.media.inputs import MediaKind

logger = logging.getLogger(__name__)

PREFIXES = ("model.visual.", "visual.")
"""What names of vision weights begin with: since transformers 4.52, and before."""


class QwenVLEncoder(MediaEncoder[NoOptions]):
    """The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE.

    Pieces are encoded one at a time: the answer for one does not depend on the others to the last bit, and memory is
    that of the largest.
    """

    def __init__(self, options: NoOptions, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        self._spec = VisionSpec.from_config(ctx.hf_config)
        kinds: tuple[MediaKind, ...] = ("image", "video")
        trained = HALF if self._spec.grid_rows else CLIP
        self._pixels = {kind: PixelSpec.from_directory(ctx.directory, kind, trained) for kind in kinds}
        self._tower: VisionTower | None = None

    @classmethod
    def supports(cls, options: NoOptions, ctx: ModelContext) -> str | None:
        """Return None where `VisionSpec` can read the config, else what it could not read."""
        try:
            VisionSpec.from_config(ctx.hf_config)
        except ModelError as error:
            return str(error)
        return None

    @property
    def levels(self) -> int:
        """One per deepstack layer; 0 before Qwen3-VL."""
        return len(self._spec.deep)

    def load(self) -> None:
        """Allocate the tower, copy every vision tensor into its place, dequantised, and pack where that is worth it."""
        ctx, coded = self.ctx, quantized_weights(self.ctx)
        prefix = vision_prefix(ctx.directory)

        def ignore(name: str) -> bool:
            # Old checkpoints carry the rope's buffer.
            return not name.startswith(prefix) or name.endswith("rotary_pos_emb.inv_freq")

        def tower_on(device: torch.device) -> VisionTower:
            return VisionTower(self._spec, dtype=ctx.dtype, device=device)

        check_weights(ctx.directory, tower_on(torch.device("meta")).targets(prefix), ignore=ignore, coded=coded)
        tower = tower_on(ctx.device)
        load_weights(ctx.directory, tower.targets(prefix), ignore=ignore, coded=coded)
        if (reason := why_not_packed(ctx.dtype, ctx.device)) is None:
            tower.pack()
        logger.info("vision tower: %s", "weights packed by oneDNN" if reason is None else f"plain torch; {reason}")
        self._tower = tower.eval()

    def tokens(self, item: MediaItem, piece: int) -> int:
        """Return the number of merged blocks of a picture, or of a temporal patch."""
        rows, columns = grid_of(self._spec, item, piece)
        return rows * columns // self._spec.merge**2

    @torch.inference_mode()
    def encode(self, pieces: Sequence[MediaPiece]) -> list[MediaStates]:
        """Encode one piece after another. Raises ValueError as `tokens` does, and for pixels that are not the item's.

        `load` comes first.
        """
        if self._tower is None:
            raise RuntimeError("load() the encoder before it encodes")
        return [self._encode(self._tower, piece) for piece in pieces]

    def _encode(self, tower: VisionTower, piece: MediaPiece) -> MediaStates:
        grid = grid_of(self._spec, piece.item, piece.piece)
        pixels, device, dtype = self._pixels[piece.item.kind], self.ctx.device, self.ctx.dtype
        # The patches, several times as large as any state, are gone before the first layer runs.
        x = tower.embed(patches_of(self._spec, pixels, piece, grid, device, dtype), *grid)
        return MediaStates(*tower(x, *grid))


def vision_prefix(directory: Path) -> str:
    """Return what the names of vision weights begin with in a checkpoint. Raises ModelError where it has none."""
    files = checkpoint_files(directory)
    names = list(chain.from_iterable(promised or read_header(file) for file, promised in files.items()))
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    raise ModelError(f"{directory} has no vision weights: no tensor's name begins with {' or '.join(PREFIXES)}")
