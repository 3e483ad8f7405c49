"""Recovery: a forward pass that raised is run again in halves, until the request to blame is alone. Media that cannot
be encoded together are encoded one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.registry.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import EncodePiece
    from pegboard.core.interfaces.media import MediaItem
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.batch_result import BatchResult
    from pegboard.core.pipeline.executor import Executor
    from pegboard.core.pipeline.media.books import EncoderBooks
    from pegboard.core.pipeline.req_to_token import ReqToTokenPool
    from pegboard.core.pipeline.stages import Stages
    from pegboard.core.pipeline.step import EncodeStep, Step

logger = logging.getLogger(__name__)

MAX_SINGLE_FAILURES = 4
"""After so many requests of a step, or pieces of media, have failed alone and none has passed, the fault is not that of
one: all fail.
"""


class DeviceFailed(RuntimeError):
    """The device does not come back. The process has to start anew."""


def encode_apart(step: EncodeStep, books: EncoderBooks, executor: Executor) -> Iterator[tuple[list[Req], Exception]]:
    """Encode the pieces of a failed step again, one by one. Yield those who want a piece that fails alone, and why.

    Nothing else may be under way. Raises DeviceFailed where the device has failed. A file that is gone says nothing of
    the encoder, so only other errors count towards `MAX_SINGLE_FAILURES`.
    """
    books.forget(piece.key for piece in step.work.pieces)
    passed = failed = 0
    last: Exception | None = None
    for piece, owners in zip(step.work.pieces, step.owners, strict=True):
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
        executor.encode(work).result()
    except Exception as error:
        books.forget((piece.key,))
        return error
    return None


class Recovery:
    """Bisection of a failed step, allowed because nothing of it was committed: its KV goes to the same places again."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._builder: BatchBuilder = stages.builder
        self._rows: ReqToTokenPool = stages.memory.rows
        self._passed = 0
        self._failed = 0

    def parts(self, step: Step, error: Exception) -> Iterator[tuple[Step, BatchResult | None, Exception]]:
        """Yield parts of the step with their results, or with None and the error where a request failed alone.

        The caller commits each part before it asks for the next one. Raises DeviceFailed where another forward pass
        has no chance.
        """
        self._passed = self._failed = 0
        yield from self._split(step, 0, len(step.batch.reqs), error)

    def _split(
        self, step: Step, start: int, stop: int, error: Exception
    ) -> Iterator[tuple[Step, BatchResult | None, Exception]]:
        if not self._stages.executor.healthy():
            raise DeviceFailed("the device has failed; the scheduler process has to start anew") from error
        hopeless = not self._passed and self._failed >= MAX_SINGLE_FAILURES
        if stop - start == 1 or hopeless:
            self._failed += 1
            lost = self._builder.part(step, start, stop)
            if lost is not None:
                # It is not run, and what the row table owes the worker is others' as well.
                self._rows.send_again(lost.work.table)
                yield lost, None, error
            return
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            part = self._builder.part(step, low, high)
            if part is None:
                continue
            try:
                result = self._stages.again(part)
            except Exception as again:
                self._rows.send_again(part.work.table)
                logger.warning(
                    "requests %d to %d of batch %d fail again: %s", low, high - 1, step.number, text_of(again)
                )
                yield from self._split(step, low, high, again)
            else:
                self._passed += 1
                yield part, result, error
