"""What travels between the halves of the stage: media of a request, pieces to encode, and where their states go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.req import ReqSlot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req, TokenPositions
    from pegboard.plugins.media.api import MediaItem, MediaSpan, PieceKey

NAME = "media"
"""The stage, in all its halves."""
MAX_SINGLE_FAILURES = 4
"""After so many pieces of a step have failed alone and none has passed, the fault is not that of one: all fail."""


@dataclass(frozen=True, slots=True)
class EncodePiece:
    """One piece to be encoded, and how many tokens stand for it."""

    key: PieceKey
    item: MediaItem
    tokens: int


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """What is to be encoded: states to `drop` first, then `pieces` to encode and keep."""

    pieces: tuple[EncodePiece, ...]
    drop: tuple[PieceKey, ...] = ()


@dataclass(frozen=True, slots=True)
class OverlayPart:
    """Packed tokens [row, row + count) are those of an encoded piece from `offset` on."""

    key: PieceKey
    offset: int
    count: int
    row: int


@dataclass(frozen=True, slots=True)
class ReqMedia:
    """A prompt's media. `spans` in their order, with what each of them shows in `pieces`. `starts` and `stops` int64
    [spans] are the spans' own. `keys` int64 [prompt tokens] stand for the prompt in prefix caches.
    """

    items: tuple[MediaItem, ...]
    spans: tuple[MediaSpan, ...]
    pieces: tuple[PieceKey, ...]
    positions: TokenPositions
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    keys: NDArray[np.int64]

    def spans_in(self, start: int, stop: int) -> range:
        """Return the indices of the spans that have some of the tokens [start, stop)."""
        first = int(np.searchsorted(self.stops, start, "right"))
        return range(first, max(first, int(np.searchsorted(self.starts, stop, "left"))))

    def within(self, namespace: str) -> ReqMedia:
        """Return them with pieces of this namespace: a request may be put into another one before it has KV."""
        if not self.pieces or self.pieces[0].namespace == namespace:
            return self
        return replace(self, pieces=tuple(piece._replace(namespace=namespace) for piece in self.pieces))


class Kept:
    """A request's place for its media."""

    media: ReqMedia | None = None


KEPT = ReqSlot(Kept)


def media_of(req: Req) -> ReqMedia | None:
    """Return the media of a request, in its namespace; None where it has none."""
    kept = KEPT.peek(req)
    if kept is None or kept.media is None:
        return None
    kept.media = kept.media.within(req.namespace)
    return kept.media
