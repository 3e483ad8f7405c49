"""The media of an arriving request: checked against its prompt, and made identifiable for caches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.req import TokenPositions
from pegboard.plugins.media.api import PieceKey
from pegboard.plugins.media.work import ReqMedia

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.media.api import MediaItem, MediaSpan, RequestMedia
    from pegboard.plugins.media.encoder_cache import EncoderCache

DIGEST_BYTES = 32
_KEY_BITS = (1 << 62) - 1


class MediaMismatch(ValueError):
    """Media that do not fit their prompt or their files: the API process and this one do not agree."""


class CountsTokens(Protocol):
    """The part of a MediaEncoder that takes no device."""

    def tokens(self, item: MediaItem, piece: int) -> int: ...


class Arrivals:
    """Takes media in. `books` say what is encoded, for KV in pages of `page_size` tokens. `width` is how many numbers
    an encoded token has. `directory` is where the files of items are.
    """

    def __init__(
        self, encoder: CountsTokens, books: EncoderCache, page_size: int, directory: Path, width: int = 0
    ) -> None:
        self.books = books
        self.directory = directory
        self._encoder = encoder
        self._page_size = page_size
        self._width = width
        self._last: tuple[RequestMedia, bytes, str, ReqMedia] | None = None

    def read(self, media: RequestMedia, prompt_ids: NDArray[np.int64], namespace: str) -> ReqMedia:
        """Return a request's media, checked: every piece of every item has one span, of as many tokens as the encoder
        makes of it, in order and within the prompt, and every item its file.

        Several answers to one prompt share them. Raises MediaMismatch, and InvalidRequest for pieces that are too large
        to be encoded side by side.
        """
        if self._last is not None and self._last[:3] == (media, prompt_ids.tobytes(), namespace):
            return self._last[3]
        found = self._read(media, prompt_ids, namespace)
        self._last = (media, prompt_ids.tobytes(), namespace, found)
        return found

    def _read(self, media: RequestMedia, prompt_ids: NDArray[np.int64], namespace: str) -> ReqMedia:
        prompt_len = prompt_ids.shape[0]
        positions = np.frombuffer(media.positions, "<i4")
        if positions.shape[0] != 3 * prompt_len:
            raise MediaMismatch(f"{positions.shape[0]} positions for a prompt of {prompt_len} tokens on three axes")
        for item in media.items:
            self._check_item(item)
        self._check_spans(media, prompt_len)
        starts = np.fromiter((span.start for span in media.spans), np.int64, len(media.spans))
        counts = np.fromiter((span.count for span in media.spans), np.int64, len(media.spans))
        pieces = tuple(PieceKey(namespace, media.items[span.item].digest, span.piece) for span in media.spans)
        found = ReqMedia(
            items=media.items,
            spans=media.spans,
            pieces=pieces,
            positions=TokenPositions(positions.reshape(3, prompt_len).astype(np.int64), media.delta),
            starts=starts,
            stops=starts + counts,
            keys=key_lane(prompt_ids, media.spans, pieces),
        )
        self._check_size(found)
        return found

    def _check_item(self, item: MediaItem) -> None:
        if len(item.digest) != DIGEST_BYTES or min(*item.shape, item.pieces) < 1 or item.shape[0] % item.pieces:
            raise MediaMismatch(f"an item of shape {item.shape} in {item.pieces} pieces")
        if Path(item.file).name != item.file:
            raise MediaMismatch(f"{item.file!r} is not a file name")
        try:
            size = (self.directory / item.file).stat().st_size
        except OSError as error:
            raise MediaMismatch(f"the file of an item is gone: {error.strerror}") from error
        states = item.encoded
        if states is not None and states.shape[1] != self._width:
            raise MediaMismatch(f"states with {states.shape[1]} numbers a token, and not {self._width}")
        if size != (math.prod(item.shape) if states is None else states.nbytes):
            raise MediaMismatch(f"a file of {size} bytes for an item of shape {item.shape}")

    def _check_spans(self, media: RequestMedia, prompt_len: int) -> None:
        expected = [(index, piece) for index, item in enumerate(media.items) for piece in range(item.pieces)]
        if [(span.item, span.piece) for span in media.spans] != expected:
            raise MediaMismatch(f"{len(media.spans)} spans for {len(expected)} pieces, or in another order")
        end = 0
        for span in media.spans:
            if span.start < end or span.count < 1 or span.start + span.count > prompt_len:
                raise MediaMismatch(f"tokens {span.start} to {span.start + span.count} of {prompt_len} for a piece")
            end = span.start + span.count
            try:
                tokens = self._encoder.tokens(media.items[span.item], span.piece)
            except ValueError as error:
                raise MediaMismatch(str(error)) from error
            if tokens != span.count:
                raise MediaMismatch(f"{span.count} tokens for a piece that the encoder makes {tokens} of")
            item = media.items[span.item]
            if item.encoded is not None and item.encoded.shape[0] != tokens * item.pieces:
                raise MediaMismatch(f"{item.encoded.shape[0]} states for {item.pieces} pieces of {tokens} tokens")

    def _check_size(self, media: ReqMedia) -> None:
        size = self.books.too_large(media, self._page_size)
        if size:
            raise InvalidRequest(
                f"this prompt's media take {size} bytes at once when they are encoded, and the server has "
                f"{self.books.capacity} for that; send smaller ones (media.cache_bytes)",
                code="media_too_large",
            )


def key_lane(
    prompt_ids: NDArray[np.int64], spans: Sequence[MediaSpan], pieces: Sequence[PieceKey]
) -> NDArray[np.int64]:
    """Return what identifies each token of the prompt to prefix caches: its id, and at media a negative number of 62
    bits, drawn for each position from what the piece shows.

    Two pictures share a number with probability 2^-62 per position, independent of all other positions, so a page of
    one is not taken for a page of the other.
    """
    keys = prompt_ids.copy()
    for span, piece in zip(spans, pieces, strict=True):
        # An extendable hash gives all numbers of a span in one call.
        drawn = hashlib.shake_256(piece.digest + piece.piece.to_bytes(8, "little")).digest(8 * span.count)
        numbers = np.frombuffer(drawn, "<i8") & _KEY_BITS
        keys[span.start : span.start + span.count] = -1 - numbers
    return keys
