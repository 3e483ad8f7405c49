"""The scheduler's half: requests' media taken in, prompts cut where something is not encoded, and what a step reads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.req import KeyedTokens
from pegboard.core.interfaces.stage import Interest, Stage, Wait
from pegboard.plugins.media.api import RequestMedia
from pegboard.plugins.media.arrival import MediaMismatch
from pegboard.plugins.media.encoder_cache import EncodeQueue
from pegboard.plugins.media.encoding import Encoding
from pegboard.plugins.media.overlays import overlay_of
from pegboard.plugins.media.work import KEPT, NAME, media_of
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepView
    from pegboard.core.interfaces.step import CoreServices
    from pegboard.plugins.media.arrival import Arrivals
    from pegboard.plugins.media.work import OverlayPart

logger = logging.getLogger(__name__)


class MediaStage(Stage):
    """Media of a model that takes them. `arrivals` reads what requests bring, and has the books. `said` is what the API
    process has to know (`Stage.info`). KV is in pages of `page_size` tokens.
    """

    name = NAME

    def __init__(
        self, arrivals: Arrivals, page_size: int, offers: tuple[str, ...] = (), said: Mapping[str, object] | None = None
    ) -> None:
        self.offers = offers
        self.arrivals = arrivals
        self.books = arrivals.books
        self.encoding: Encoding | None = None
        self._page_size = page_size
        self._said = said or {}
        self._wishes: EncodeQueue | None = None

    def sources(self, core: CoreServices) -> tuple[Encoding]:
        self.encoding = Encoding(self.books, lambda: self._wishes, core)
        return (self.encoding,)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        stated = message.features.get(NAME)
        if stated is None:
            return None
        try:
            media = self.arrivals.read(msgspec.msgpack.decode(stated, type=RequestMedia), req.prompt_ids, req.namespace)
        except MediaMismatch as error:
            logger.error("the media of %s do not fit: %s", quoted(message.rid), error)
            text = "the media of this request were lost; try again"
            raise InvalidRequest(text, code="media_failed", status=500) from error
        KEPT.of(req).media = media
        req.positions = media.positions
        req.tokens = KeyedTokens(req.prompt_ids, media.keys)
        return Interest()

    # ---- a plan ----------------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        self._wishes = None

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        """Cut a prompt before what is not encoded. That is wished for, unless there is no room for it now."""
        media = media_of(req)
        assert media is not None
        ready = self.books.ready_until(media, start, start + take)
        if ready == start + take:
            return take
        if self._wishes is None:
            self._wishes = EncodeQueue(self.books)
        self._wishes.add(req, media, start, start + take)
        if self._wishes.pieces:
            return Wait.STOP if self._wishes.full else Wait.HOLD
        ready = ready // self._page_size * self._page_size
        return ready - start if ready > start else Wait.STOP

    # ---- a step ----------------------------------------------------------------------------------------------------

    def pack(self, step: StepView, extras: BatchExtras) -> tuple[OverlayPart, ...] | None:
        batch = step.batch
        if batch.forward_mode.is_decode:
            return None
        parts = overlay_of(batch)
        if not self.books.holds(step.number):
            self._note(step)
            self.books.hold(step.number, (part.key for part in parts))
        return parts or None

    def _note(self, step: StepView) -> None:
        """Count what requests look at for the first time."""
        batch = step.batch
        for req, start, stop in zip(batch.reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True):
            media = media_of(req) if start < req.input_len else None
            for index in () if media is None else media.spans_in(start, stop):
                if media is not None and media.spans[index].start >= start:
                    self.books.read(media.pieces[index])

    def closed(self, step: StepView) -> None:
        self.books.release(step.number)

    # ---- what is told ----------------------------------------------------------------------------------------------

    def info(self) -> Mapping[str, object]:
        return self._said

    def figures(self) -> Mapping[str, float]:
        encoding = self.encoding
        return {
            "encode_steps": 0 if encoding is None else encoding.steps,
            "encode_time": 0.0 if encoding is None else encoding.seconds,
            "encoded_pieces": self.books.encoded,
            "encoder_cache_hits": self.books.hits,
            "encoder_cache_bytes": self.books.used,
            "encoder_cache_capacity": self.books.capacity,
        }

    def log_totals(self) -> Mapping[str, tuple[str, int]]:
        return {
            "#encoded-piece": ("encoded_pieces", self.books.encoded),
            "#encoder-hit": ("encoder_hits", self.books.hits),
        }

    def idle_error(self) -> str | None:
        return self.books.idle_error()


class NoMedia(Stage):
    """Stands for the stage where the model takes no media."""

    name = NAME

    def arrive(self, req: Req, message: TokenizedRequest) -> None:
        if NAME in message.features:
            raise InvalidRequest("this engine takes no media here", code="unsupported")

    def figures(self) -> Mapping[str, float]:
        return {"encode_steps": 0, "encode_time": 0.0}
