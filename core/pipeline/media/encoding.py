"""Encoding: steps that encode the media which a prefill lacks, and what becomes of those that cannot be encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.interfaces.step import SETTLE, Launched, Settle, StageStep, StepLost, StepSource
from pegboard.core.pipeline.recovery import MAX_SINGLE_FAILURES, DeviceFailed
from pegboard.core.registry.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import EncodePiece
    from pegboard.core.interfaces.executor import Executor, Pending
    from pegboard.core.interfaces.media import MediaItem
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.media.books import EncoderBooks
    from pegboard.core.pipeline.recovery import Recovery
    from pegboard.core.pipeline.sources import Prefill
    from pegboard.core.pipeline.stages import Stages

MEDIA = "media"
"""The stage whose work this is."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EncodeStep(StageStep):
    """`owners` are the requests that want each of its `pieces`."""

    pieces: tuple[EncodePiece, ...]
    owners: tuple[tuple[Req, ...], ...]
    pending: Pending[float] | None = field(default=None, kw_only=True)

    @property
    def reqs(self) -> list[Req]:
        return list(dict.fromkeys(req for reqs in self.owners for req in reqs))


class Encoding(StepSource[EncodeStep, float]):
    """Is asked after `prefill`, which says what it lacked. Results are the seconds that encoding took."""

    def __init__(
        self,
        books: EncoderBooks,
        prefill: Prefill,
        stages: Stages,
        recovery: Recovery,
        requests: Lifecycle,
        counters: Counters,
    ) -> None:
        self._books = books
        self._prefill = prefill
        self._stages = stages
        self._recovery = recovery
        self._requests = requests
        self._counters = counters

    def next(self, flight: Launched | None) -> EncodeStep | Settle | None:
        """Plan a step that encodes what the last prefill lacked; None where it lacked nothing, or nothing that fits
        now.
        """
        wishes = self._prefill.wishes
        if wishes is None:
            return None
        if not wishes.pieces:
            return SETTLE if wishes.blocked and flight is not None else None
        self._counters.encode_steps += 1
        owners = tuple(tuple(reqs) for reqs in wishes.owners.values())
        work = wishes.plan()
        step = EncodeStep(self._stages.builder.next_number(), StageWork(MEDIA, work), work.pieces, owners)
        step.source = self
        return step

    def settle(self, step: EncodeStep, result: float) -> None:
        self._counters.encode_time += result
        if self._stages.report is not None:
            self._stages.report.encode(len(step.pieces), sum(piece.tokens for piece in step.pieces), result)

    def undo(self, step: EncodeStep) -> None:
        self._books.forget(piece.key for piece in step.pieces)

    def behind_failed(self, step: EncodeStep, failed: Launched, own_error: Exception | None) -> None:
        """Keep what was encoded, whatever became of the step before."""
        if isinstance(own_error, StepLost):
            self.undo(step)
        elif own_error is not None:
            self.failed(step, own_error)
        elif step.pending is not None:
            self.settle(step, step.pending.result())

    def failed(self, step: EncodeStep, error: Exception) -> None:
        """Encode its pieces one by one. Requests that want one which fails alone end with status 500. A file that is
        gone does not count as a failure: its request may have ended.
        """
        if not isinstance(error, OSError):
            self._recovery.note(step.number, f"{len(step.pieces)} pieces of media", error)
        for wanting, why in encode_apart(step, self._books, self._stages.executor):
            reason = FinishReason(FinishType.ABORT, message=self._told(why), status=500, code="media_failed")
            for req in wanting:
                self._requests.end(req, reason, keep=False)

    def _told(self, why: Exception) -> str:
        """Return what clients learn of media that cannot be encoded."""
        if isinstance(why, OSError):
            logger.error("a file of media cannot be read: %s", why)
            return "the media of this request were lost; try again"
        culprit = self._stages.culprits.of(why)
        return f"encoding media failed: {text_of(why)}" if culprit is None else culprit.tell(why)


def encode_apart(step: EncodeStep, books: EncoderBooks, executor: Executor) -> Iterator[tuple[list[Req], Exception]]:
    """Encode the pieces of a failed step again, one by one. Yield those who want a piece that fails alone, and why.

    Nothing else may be under way. Raises DeviceFailed where the device has failed. A file that is gone says nothing of
    the encoder, so only other errors count towards `MAX_SINGLE_FAILURES`.
    """
    books.forget(piece.key for piece in step.pieces)
    passed = failed = 0
    last: Exception | None = None
    for piece, owners in zip(step.pieces, step.owners, strict=True):
        wanting = [req for req in dict.fromkeys(owners) if not req.finished]
        if not wanting:
            continue
        hopeless = not passed and failed >= MAX_SINGLE_FAILURES
        why = last if hopeless else _encode_copies(piece, wanting, books, executor)
        if why is None:
            passed += 1
            continue
        if not executor.healthy():
            raise DeviceFailed("the device has failed; the scheduler process has to start anew") from why
        if not isinstance(why, OSError):
            failed, last = failed + 1, why
        yield wanting, why


def _encode_copies(
    piece: EncodePiece, wanting: Iterable[Req], books: EncoderBooks, executor: Executor
) -> Exception | None:
    """Encode a piece from the first of its files that is there; what the last try raised."""
    why: Exception | None = None
    for item in _copies(piece, wanting):
        why = _encode_alone(replace(piece, item=item), books, executor)
        if not isinstance(why, OSError):
            break  # another copy would do no better
    return why


def _copies(piece: EncodePiece, reqs: Iterable[Req]) -> list[MediaItem]:
    """Return the item in each of the files that show it: a request's file goes when that one ends."""
    items = (item for req in reqs if req.media is not None for item in req.media.items)
    return list({item.file: item for item in items if item.digest == piece.key.digest}.values())


def _encode_alone(piece: EncodePiece, books: EncoderBooks, executor: Executor) -> Exception | None:
    work = books.plan((piece,), ())
    try:
        executor.ask(MEDIA, work)
    except Exception as error:
        books.forget((piece.key,))
        return error
    return None
