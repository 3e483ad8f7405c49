"""Placing: where the tokens of a batch stand, and which of them are media's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import OverlayPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req, ReqMedia

Spans = Sequence[tuple["Req", int, int]]
"""Each request of a batch with the tokens [start, stop) that it computes."""


def positions_of(spans: Spans) -> NDArray[np.int64]:
    """Return the positions int64 [tokens] of a batch, or [3, tokens] where it computes a prompt with media."""
    if not any(req.media is not None for req, _, _ in spans):
        return np.concatenate([np.arange(start, stop) for _, start, stop in spans])
    if not any(req.media is not None and start < req.input_len for req, start, _ in spans):
        deltas = [0 if req.media is None else req.media.delta for req, _, _ in spans]
        return np.concatenate(
            [np.arange(start + delta, stop + delta) for (_, start, stop), delta in zip(spans, deltas, strict=True)]
        )
    return np.concatenate([_axes(req, start, stop) for req, start, stop in spans], axis=1)


def _axes(req: Req, start: int, stop: int) -> NDArray[np.int64]:
    if req.media is None:
        return np.broadcast_to(np.arange(start, stop), (3, stop - start))
    return req.media.positions_of(start, stop)


def overlay_of(spans: Spans) -> tuple[OverlayPart, ...]:
    """Return which packed tokens of a batch take the place of token embeddings, and from which encoded piece."""
    parts: list[OverlayPart] = []
    packed = 0
    for req, start, stop in spans:
        if req.media is not None:
            parts += _parts(req.media, start, stop, packed - start)
        packed += stop - start
    return tuple(parts)


def _parts(media: ReqMedia, start: int, stop: int, shift: int) -> Iterator[OverlayPart]:
    """Yield the parts of tokens [start, stop) of a prompt, whose token i is packed at i + shift."""
    for index in media.spans_in(start, stop):
        span = media.spans[index]
        first, last = max(start, span.start), min(stop, span.start + span.count)
        yield OverlayPart(media.pieces[index], first - span.start, last - first, first + shift)
