"""Encoded media in the worker: pixels from their files, states from the encoder, and overlays from states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.forward import EmbedOverlay
from pegboard.core.interfaces.media import MediaPiece, MediaStates
from pegboard.core.pipeline.culprits import BadAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import EncodePiece, EncodeWork, OverlayPart
    from pegboard.core.interfaces.media import MediaEncoder, MediaItem, PieceKey


class EncodedMedia:
    """The states of the pieces that EncoderBooks has, on the device. It does as it is told, in launch order.

    `directory` is where the files of items are: it is set before the first request comes. `hidden_size` and `dtype` are
    the model's.
    """

    def __init__(self, encoder: MediaEncoder, hidden_size: int, dtype: torch.dtype) -> None:
        self.directory = Path()
        self._encoder = encoder
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._states: dict[PieceKey, MediaStates] = {}

    def __len__(self) -> int:
        return len(self._states)

    @torch.inference_mode()
    def encode(self, work: EncodeWork) -> float:
        """Drop and encode what the list says; the seconds that it took. Where it raises, none of the pieces is kept."""
        started = time.perf_counter()
        for key in work.drop:
            self._states.pop(key, None)
        pieces = [
            MediaPiece(one.item, one.key.piece, read_piece(self.directory, one.item, one.key.piece))
            for one in work.pieces
        ]
        found = self._encoder.encode(pieces)
        if len(found) != len(pieces):
            raise BadAnswer(f"{len(found)} encoded pieces of {len(pieces)}", self._encoder)
        for one, states in zip(work.pieces, found, strict=True):
            self._check(one, states)
        self._states.update((one.key, _alone(states)) for one, states in zip(work.pieces, found, strict=True))
        return time.perf_counter() - started

    def overlay(self, parts: Sequence[OverlayPart], device: torch.device) -> EmbedOverlay | None:
        """Return the states of a batch's media tokens; None where it has none."""
        if not parts:
            return None
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in parts])
        found = [self._states[part.key] for part in parts]

        def gathered(lanes: list[torch.Tensor]) -> torch.Tensor:
            cut = [lane[part.offset : part.offset + part.count] for lane, part in zip(lanes, parts, strict=True)]
            return cut[0] if len(cut) == 1 else torch.cat(cut)

        return EmbedOverlay(
            rows=torch.from_numpy(rows).to(device),
            states=gathered([one.states for one in found]),
            deep=tuple(gathered([one.deep[level] for one in found]) for level in range(self._encoder.levels)),
        )

    def _check(self, piece: EncodePiece, states: MediaStates) -> None:
        """Raise BadAnswer for states of the wrong form: they would be found out amid a batch of others."""
        lanes = (states.states, *states.deep)
        if len(states.deep) != self._encoder.levels:
            raise BadAnswer(f"{len(states.deep)} deep states of {self._encoder.levels}", self._encoder)
        wanted = (piece.tokens, self._hidden_size)
        for lane in lanes:
            if tuple(lane.shape) != wanted or lane.dtype is not self._dtype:
                given = f"{str(lane.dtype).removeprefix('torch.')} {list(lane.shape)}"
                expected = f"{str(self._dtype).removeprefix('torch.')} {list(wanted)}"
                raise BadAnswer(f"states of a piece must be {expected}, and not {given}", self._encoder)


def _alone(states: MediaStates) -> MediaStates:
    """Return states in memory of their own: a view would keep what it is a part of."""

    def owned(lane: torch.Tensor) -> torch.Tensor:
        return lane.clone() if lane.untyped_storage().nbytes() > lane.nbytes else lane

    return MediaStates(owned(states.states), tuple(map(owned, states.deep)))


def read_piece(directory: Path, item: MediaItem, piece: int) -> NDArray[np.uint8]:
    """Return the pixels uint8 [frames, height, width, 3] of a piece. Raises OSError where the file is gone or short."""
    frames, height, width, channels = item.shape
    each = frames // item.pieces
    shape = (each, height, width, channels)
    size = each * height * width * channels
    with (directory / item.file).open("rb", buffering=0) as stream:
        stream.seek(piece * size)
        pixels = np.empty(size, np.uint8)
        view = pixels.data
        while view:
            count = stream.readinto(view)
            if not count:
                raise OSError(f"the file of an item of shape {item.shape} is short")
            view = view[count:]
    return pixels.reshape(shape)
