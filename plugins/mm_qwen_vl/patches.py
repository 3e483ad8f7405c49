"""Pieces of media as the towers take them: checked against their items, and cut into patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from pegboard.plugins.media.api import MediaItem, MediaPiece
    from pegboard.plugins.mm_qwen_vl.pixel_spec import PixelSpec
    from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec


def grid_of(spec: VisionSpec, item: MediaItem, piece: int) -> tuple[int, int]:
    """Return rows and columns of patches of a piece. Raises ValueError for an item whose shape, grid and number of
    pieces do not belong together, and for a piece that it does not have.
    """
    time, rows, columns = item.grid
    pieces = time if item.kind == "video" else 1
    frames = time * spec.temporal if item.kind == "video" else 1
    if min(item.grid) < 1 or rows % spec.merge or columns % spec.merge or (item.kind == "image" and time != 1):
        raise ValueError(
            f"grid {item.grid} is not that of an {item.kind} item: rows and columns come in multiples of {spec.merge}, "
            f"and an image has a time of 1"
        )
    if item.shape != (frames, rows * spec.patch, columns * spec.patch, 3):
        raise ValueError(
            f"shape {item.shape} and grid {item.grid} do not belong together: patches have {spec.patch} by "
            f"{spec.patch} pixels and three channels, and those of a video {spec.temporal} frames"
        )
    if item.pieces != pieces:
        raise ValueError(f"an {item.kind} item with grid {item.grid} has {pieces} pieces, not {item.pieces}")
    if not 0 <= piece < pieces:
        raise ValueError(f"piece {piece} of an item that has {pieces}")
    return rows, columns


def patches_of(
    spec: VisionSpec,
    pixels: PixelSpec,
    piece: MediaPiece,
    grid: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the patches of a piece, [rows * columns, channels * frames * patch * patch], on `device`. They are
    normalized in float32 and rounded to `dtype` once.

    Patches that are merged into one token follow each other. An image's only frame is repeated. Raises ValueError for
    pixels of another dtype or shape than the item says.
    """
    rows, columns = grid
    found = piece.pixels
    shape = (spec.temporal if piece.item.kind == "video" else 1, rows * spec.patch, columns * spec.patch, 3)
    if found.dtype != np.uint8 or found.shape != shape:
        raise ValueError(f"pixels are {found.dtype} {list(found.shape)}, the item says uint8 {list(shape)}")
    # torch takes no read-only memory, such as a mapped file.
    frames = torch.from_numpy(np.require(found, requirements=("C", "W"))).to(device)
    merge, patch = spec.merge, spec.patch
    blocks = frames.view(shape[0], rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # Moved as bytes, which are a quarter of the floats. An image's frame is repeated last, when it is cheapest.
    bytes_of_patches = blocks.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns, 3, shape[0], patch**2)
    mean, std = (torch.tensor(one, device=device)[:, None, None] for one in (pixels.mean, pixels.std))
    normal = bytes_of_patches.float().mul_(pixels.scale).sub_(mean).div_(std).to(dtype)
    return normal.expand(-1, -1, spec.temporal, -1).reshape(rows * columns, -1)
