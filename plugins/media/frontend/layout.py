"""Layouts: prompts with their media in them, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import RequestMedia

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.frontend import TokenIds
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.plugins.media.api import MediaItem, MediaLayout, MediaProcessor
    from pegboard.toolkit.media.inputs import MediaInput


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A prompt's ids int64 [length], its media, and how many of its tokens are theirs, by kind."""

    ids: NDArray[np.int64]
    media: RequestMedia | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)


class Layouts:
    """Lays prompts out by the model's processor. Pure, and safe to use from several threads."""

    def __init__(self, processor: MediaProcessor, tokenizer: Tokenizer) -> None:
        self.processor = processor
        self._tokenizer = tokenizer
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in processor.reserved]
        self._reserved = np.array(sorted(ids[0] for ids in encoded if len(ids) == 1), np.int32)

    def concern(self, ids: TokenIds) -> bool:
        """Return whether a prompt has a token that means media. Costs a prompt that has none a few microseconds."""
        if not self._reserved.size:
            return False
        near = ids[(ids >= self._reserved[0]) & (ids <= self._reserved[-1])]
        return bool(near.size) and bool(np.isin(near, self._reserved).any())

    def check_places(self, ids: Sequence[int], media: Sequence[MediaInput]) -> None:
        """Raise InvalidRequest where a prompt's placeholders do not match its media, which are not prepared yet."""
        self.processor.check_places(ids, [one.kind for one in media])

    def lay_out(self, ids: Sequence[int], items: Sequence[MediaItem]) -> LaidOut:
        """Expand placeholders. Raises InvalidRequest where they and the items do not match, and for a piece of more
        tokens than the processor's limits allow: its encoding would hold up every other request.
        """
        found = self.processor.lay_out(ids, items, self._encode)
        if not found.spans and not items:
            return LaidOut(np.asarray(ids, np.int64))
        if (problem := _problem(found, items)) is not None:
            raise TypeError(f"{type(self.processor).__name__}.lay_out: {problem}")
        _check_pieces(found, items, self.processor.ctx.limits.piece_tokens)
        tokens: dict[str, int] = {}
        for span in found.spans:
            kind = items[span.item].kind
            tokens[kind] = tokens.get(kind, 0) + span.count
        positions = np.ascontiguousarray(found.positions, "<i4").tobytes()
        media = RequestMedia(items=tuple(items), spans=found.spans, positions=positions, delta=found.delta)
        return LaidOut(found.ids, media, tokens)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _check_pieces(layout: MediaLayout, items: Sequence[MediaItem], most: int | None) -> None:
    for span in layout.spans:
        if most is not None and span.count > most and items[span.item].encoded is None:
            what = "a picture" if items[span.item].kind == "image" else "a video's frames that are encoded together"
            raise InvalidRequest(
                f"item {span.item + 1} of this prompt's media is too large: {what} may have {most} tokens "
                f"(media.max_piece_tokens), and this has {span.count}; send a smaller one, or set max_pixels",
                code="media_too_large",
            )


def _problem(layout: MediaLayout, items: Sequence[MediaItem]) -> str | None:
    """Return what is wrong with a layout, which is its processor's fault; None for nothing."""
    length = len(layout.ids)
    if layout.positions.shape != (3, length):
        return f"positions of the shape {layout.positions.shape} for {length} tokens"
    at = 0
    for span in layout.spans:
        if span.start < at or span.count < 1:
            return f"{span} does not follow the one before"
        at = span.start + span.count
    if at > length:
        return f"a span ends at {at} of {length} tokens"
    pieces = sorted((index, piece) for index, item in enumerate(items) for piece in range(item.pieces))
    if sorted((span.item, span.piece) for span in layout.spans) != pieces:
        return "there is not one span for each piece"
    return None
