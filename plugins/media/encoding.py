"""Encoding: steps that encode the media which a prefill lacks, and what becomes of those that cannot be encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.step import SETTLE, BaseStep, Settle, StageStep, StepLost, StepSource
from pegboard.plugins.media.work import MAX_SINGLE_FAILURES, NAME, media_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import CoreServices
    from pegboard.plugins.media.api import MediaItem
    from pegboard.plugins.media.encoder_cache import EncodeQueue, EncoderCache
    from pegboard.plugins.media.work import EncodePiece

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EncodeStep(StageStep):
    """`owners` are the requests that want each of its `pieces`."""

    pieces: tuple[EncodePiece, ...]
    owners: tuple[tuple[Req, ...], ...]

    @property
    def reqs(self) -> list[Req]:
        return list(dict.fromkeys(req for reqs in self.owners for req in reqs))


class Encoding(StepSource[EncodeStep, float]):
    """Is asked after prefills: `wishes` says what the last one lacked. Results are the seconds that encoding took."""

    def __init__(self, books: EncoderCache, wishes: Callable[[], EncodeQueue | None], core: CoreServices) -> None:
        self.steps = 0
        """Steps that encoded media."""
        self.seconds = 0.0
        """Time that they took."""
        self._books = books
        self._wishes = wishes
        self._core = core

    def next(self, in_flight: BaseStep | None) -> EncodeStep | Settle | None:
        """Plan a step that encodes what the last prefill lacked; None where it lacked nothing, or nothing that fits
        now.
        """
        wishes = self._wishes()
        if wishes is None:
            return None
        if not wishes.pieces:
            return SETTLE if wishes.blocked and in_flight is not None else None
        self.steps += 1
        owners = tuple(tuple(reqs) for reqs in wishes.owners.values())
        work = wishes.plan()
        step = EncodeStep(self._core.next_number(), StageWork(NAME, work), work.pieces, owners)
        step.source = self
        return step

    def process_result(self, step: EncodeStep, result: float) -> None:
        self.seconds += result
        tokens = sum(piece.tokens for piece in step.pieces)
        logger.debug("Encode batch. #piece: %d, #token: %d, took: %.1f ms", len(step.pieces), tokens, result * 1000)

    def undo(self, step: EncodeStep) -> None:
        self._books.forget(piece.key for piece in step.pieces)

    def behind_failed(self, step: EncodeStep, failed: BaseStep, own_error: Exception | None) -> None:
        """Keep what was encoded, whatever became of the step before."""
        if isinstance(own_error, StepLost):
            self.undo(step)
        elif own_error is not None:
            self.failed(step, own_error)
        elif step.pending is not None:
            step.source.process_result(step, step.pending.result())

    def failed(self, step: EncodeStep, error: Exception) -> None:
        """Encode its pieces one by one. Requests that want one which fails alone end with status 500. A file that is
        gone says nothing of the encoder, so only other errors count: its request may have ended.
        """
        if not isinstance(error, OSError):
            self._core.note(step.number, f"{len(step.pieces)} pieces of media", error)
        self.undo(step)
        passed = failed = 0
        last: Exception | None = None
        for piece, owners in zip(step.pieces, step.owners, strict=True):
            wanting = [req for req in dict.fromkeys(owners) if not req.finished]
            if not wanting:
                continue
            hopeless = not passed and failed >= MAX_SINGLE_FAILURES
            why = last if hopeless else self._encode_copies(piece, wanting)
            if why is None:
                passed += 1
                continue
            self._core.check_device(why)
            if not isinstance(why, OSError):
                failed, last = failed + 1, why
            self._core.end(wanting, self._told(why), "media_failed")

    def _told(self, why: Exception) -> str:
        """Return what clients learn of media that cannot be encoded."""
        if not isinstance(why, OSError):
            return self._core.told("encoding media", why)
        logger.error("a file of media cannot be read: %s", why)
        return "the media of this request were lost; try again"

    def _encode_copies(self, piece: EncodePiece, wanting: Iterable[Req]) -> Exception | None:
        """Encode a piece alone, from the first of its files that is there; what the last try raised."""
        why: Exception | None = None
        for item in _copies(piece, wanting):
            work = self._books.plan((replace(piece, item=item),), ())
            try:
                self._core.ask(NAME, work)
            except Exception as error:
                self._books.forget((piece.key,))
                why = error
            else:
                return None
            if not isinstance(why, OSError):
                break  # another copy would do no better
        return why


def _copies(piece: EncodePiece, reqs: Iterable[Req]) -> list[MediaItem]:
    """Return the item in each of the files that show it: a request's file goes when that one ends."""
    items = (item for req in reqs if (media := media_of(req)) is not None for item in media.items)
    return list({item.file: item for item in items if item.digest == piece.key.digest}.values())
