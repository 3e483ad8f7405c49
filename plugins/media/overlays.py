"""Overlays: which tokens of a batch take the place of token embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pegboard.plugins.media.work import OverlayPart, media_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.plugins.media.work import ReqMedia


def overlay_of(batch: ScheduleBatch) -> tuple[OverlayPart, ...]:
    """Return which packed tokens of a batch take the place of token embeddings, and from which encoded piece."""
    parts: list[OverlayPart] = []
    packed = 0
    for req, start, stop in zip(batch.reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True):
        media = media_of(req) if start < req.input_len else None
        if media is not None:
            parts += _parts(media, start, stop, packed - start)
        packed += stop - start
    return tuple(parts)


def _parts(media: ReqMedia, start: int, stop: int, shift: int) -> Iterator[OverlayPart]:
    """Yield the parts of tokens [start, stop) of a prompt, whose token i is packed at i + shift."""
    for index in media.spans_in(start, stop):
        span = media.spans[index]
        first, last = max(start, span.start), min(stop, span.start + span.count)
        yield OverlayPart(media.pieces[index], first - span.start, last - first, first + shift)
