"""Encoded media in the worker: pixels from their files, states from the encoder, and overlays from states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.errors import BadAnswer
from pegboard.core.interfaces.forward import EmbedOverlay
from pegboard.plugins.media.api import MediaPiece, MediaStates
from pegboard.plugins.media.timing import HostTimer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pegboard.core.interfaces.executor import Pending
    from pegboard.plugins.media.api import MediaEncoder, MediaItem, PieceKey
    from pegboard.plugins.media.timing import Timer
    from pegboard.plugins.media.work import EncodePiece, EncodeWork, OverlayPart


class EncodedMedia:
    """The states of the pieces that EncoderCache has, on the device. It does as it is told, in launch order.

    `directory` is where the files of items are. `hidden_size` and `dtype` are the model's.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        hidden_size: int,
        dtype: torch.dtype,
        directory: Path,
        timer: Callable[[], Timer] = HostTimer,
    ) -> None:
        self.directory = directory
        self._encoder = encoder
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._timer = timer
        self._states: dict[PieceKey, MediaStates] = {}

    def __len__(self) -> int:
        return len(self._states)

    @torch.inference_mode()
    def encode(self, work: EncodeWork) -> Pending[float]:
        """Drop and encode what the list says. On an asynchronous device it may go on after this call, and only the
        result's `result` waits for it. Where this raises, none of the pieces is kept.
        """
        timer = self._timer()
        for key in work.drop:
            self._states.pop(key, None)
        found = {one.key: self._given(one) for one in work.pieces if one.item.encoded is not None}
        found |= self._encoded([one for one in work.pieces if one.item.encoded is None])
        self._states |= found
        return timer.stop()

    def _encoded(self, wanted: Sequence[EncodePiece]) -> dict[PieceKey, MediaStates]:
        """Return what the encoder makes of pieces."""
        if not wanted:
            return {}
        pieces = [
            MediaPiece(one.item, one.key.piece, read_piece(self.directory, one.item, one.key.piece)) for one in wanted
        ]
        found = self._encoder.encode(pieces)
        if len(found) != len(pieces):
            raise BadAnswer(f"{len(found)} encoded pieces of {len(pieces)}", self._encoder)
        for one, states in zip(wanted, found, strict=True):
            self._check(one, states)
        return {one.key: _alone(states) for one, states in zip(wanted, found, strict=True)}

    def _given(self, piece: EncodePiece) -> MediaStates:
        """Return the states of a piece that its request has encoded. Raises BadAnswer for those that the model's type
        cannot hold.
        """
        given = read_states(self.directory, piece.item, piece.key.piece)
        rows = given.to(self._dtype)
        if not rows.isfinite().all():
            raise BadAnswer(f"there are states that {str(self._dtype).removeprefix('torch.')} cannot hold", None)
        lanes = rows.to(self._encoder.ctx.device).chunk(1 + self._encoder.levels, 1)
        states, *deep = (lane.contiguous() for lane in lanes)
        return MediaStates(states, tuple(deep))

    def overlay(
        self, parts: Sequence[OverlayPart], put: Callable[[NDArray[np.int64]], torch.Tensor]
    ) -> EmbedOverlay | None:
        """Return the states of a batch's media tokens; None where it has none. `put` brings an array to the device."""
        if not parts:
            return None
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in parts])
        found = [self._states[part.key] for part in parts]

        def gathered(lanes: list[torch.Tensor]) -> torch.Tensor:
            cut = [lane[part.offset : part.offset + part.count] for lane, part in zip(lanes, parts, strict=True)]
            return cut[0] if len(cut) == 1 else torch.cat(cut)

        return EmbedOverlay(
            rows=put(rows),
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
    frames, *rest = item.shape
    shape = (frames // item.pieces, *rest)
    return _read(directory, item, piece, math.prod(shape)).reshape(shape)


def read_states(directory: Path, item: MediaItem, piece: int) -> torch.Tensor:
    """Return the states [tokens, width] of a piece of an item that came encoded, in its own type. Raises OSError as
    `read_piece` does.
    """
    form = item.encoded
    assert form is not None
    data = _read(directory, item, piece, form.nbytes // item.pieces)
    return torch.from_numpy(data).view(getattr(torch, form.dtype)).view(-1, form.shape[1])


def _read(directory: Path, item: MediaItem, piece: int, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a piece, each of which takes `size` of the item's file."""
    with (directory / item.file).open("rb", buffering=0) as stream:
        stream.seek(piece * size)
        found = np.empty(size, np.uint8)
        view = found.data
        while view:
            count = stream.readinto(view)
            if not count:
                raise OSError(f"the file of an item of shape {item.shape} is short")
            view = view[count:]
    return found
