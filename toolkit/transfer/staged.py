"""Reads of many small pieces in few large ones: by way of a block there and one here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from pegboard.core.interfaces.kv_transfer import Ranges, TransferError
from pegboard.toolkit.transfer.alike import alike
from pegboard.toolkit.transfer.links import Limits, Part, TokenT, Unanswered, Wire
from pegboard.toolkit.transfer.orders import AT_ONCE, MOST_PIECES
from pegboard.toolkit.transfer.pieces import Pieces

if TYPE_CHECKING:
    from pegboard.toolkit.transfer.blocks import Landing
    from pegboard.toolkit.transfer.ordering import Orders, StagingPlace

FEW = 16
"""Pieces of a read below which blocks cost more than they save."""


class StagedPart(Part):
    """A part that goes by way of blocks: its sides need not be cut alike."""


@dataclass(eq=False)
class Straight(Generic[TokenT]):
    """A part that the library reads as it is."""

    token: TokenT


@dataclass(eq=False)
class Stage(Generic[TokenT]):
    """A part that goes by way of blocks, step by step: it waits for a block here (`here` is None), then for a block of
    the peer's, then for the library (`token`), and at last for the answer to the block's return (`returned`).
    """

    part: Part
    since: float
    number: int = 0
    here: int | None = None
    token: TokenT | None = None
    returned: bool = False
    failure: str = ""


class StagedWire(Wire["Straight[TokenT] | Stage[TokenT]"], Generic[TokenT]):
    """Another wire, which reads small pieces by way of blocks.

    A part has a block here from the order to the end of the library's read: however long that takes, since the block
    may be written to until then. Where all blocks are taken by others, perhaps for good, parts go straight.
    """

    def __init__(self, inner: Wire[TokenT], landing: Landing, orders: Orders, place: StagingPlace, region: int) -> None:
        self._inner = inner
        self._landing = landing
        self._orders = orders
        self._place = place
        self._region = region
        self._numbers = itertools.count(1)
        self._stages = 0

    def open(self) -> None:
        self._inner.open()

    def parts(self, whole: Part, limits: Limits) -> Iterator[Part]:
        if not self._pays(whole):
            yield from self._inner.parts(whole, limits)
            return
        there, here = Pieces(whole.source), Pieces(whole.target)
        for begin, end in there.cuts(min(self._place.block_bytes, self._landing.blocks.size), MOST_PIECES):
            source, target = there.part(begin, end), here.part(begin, end)
            if (self._stages or self._landing.blocks.free) and self._orders.reachable():
                yield StagedPart(source, target, whole.lease)
            else:
                yield from self._inner.parts(Part(source, target, whole.lease), limits)

    def _pays(self, whole: Part) -> bool:
        """Return whether the library would have to read many small pieces."""
        below = self._landing.below
        if whole.source.total >= below * max(len(whole.source), len(whole.target)):
            return False
        pieces, _ = alike(whole.source, whole.target)
        return len(pieces) >= FEW and pieces.total < below * len(pieces)

    def ready(self) -> bool:
        return self._stages < AT_ONCE and self._inner.ready()

    def begin(self, part: Part) -> Straight[TokenT] | Stage[TokenT]:
        if not isinstance(part, StagedPart):
            return Straight(self._inner.begin(part))
        self._stages += 1
        stage = Stage[TokenT](part, self._landing.clock())
        self._order(stage)
        return stage

    def ended(self, token: Straight[TokenT] | Stage[TokenT]) -> bool:
        if isinstance(token, Straight):
            return self._inner.ended(token.token)
        try:
            ended = self._advance(token)
        except TransferError:
            self._end(token)
            raise
        if ended:
            self._end(token)
        return ended

    def close(self, under_way: Sequence[Straight[TokenT] | Stage[TokenT]]) -> None:
        """Blocks that may still be written to are not given back."""
        self._orders.close()
        self._inner.close([one.token for one in under_way if one.token is not None])

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _advance(self, stage: Stage[TokenT]) -> bool:
        """Take the next step, if it can be taken now. Raises TransferError only while the library has nothing to do."""
        if stage.here is None and not stage.returned:
            waited = self._landing.clock() - stage.since
            if not self._order(stage) and waited > self._landing.seconds:
                raise Unanswered(f"no block was free for {self._landing.seconds:g} s")
        elif stage.token is not None:
            self._look(stage, stage.token)
        elif (block := self._orders.answer(stage.number)) is not None:
            if stage.returned:
                if stage.failure:
                    raise TransferError(stage.failure)
                return True
            self._read(stage, block)
        return False

    def _order(self, stage: Stage[TokenT]) -> bool:
        """Order a part, if there is a block here for it."""
        stage.here = self._landing.blocks.take()
        if stage.here is None:
            return False
        stage.number = next(self._numbers)
        self._orders.order(stage.number, stage.part)
        return True

    def _read(self, stage: Stage[TokenT], block: int) -> None:
        assert stage.here is not None
        total = stage.part.source.total
        there = _range(self._region, block * self._place.block_bytes, total)
        here = _range(self._landing.region, self._landing.blocks.offset(stage.here), total)
        try:
            stage.token = self._inner.begin(Part(there, here, stage.part.lease))
        except TransferError as error:
            self._return(stage, str(error))

    def _look(self, stage: Stage[TokenT], token: TokenT) -> None:
        try:
            if not self._inner.ended(token):
                return
            failure = ""
        except TransferError as error:
            failure = str(error)
        stage.token = None
        self._return(stage, failure)

    def _return(self, stage: Stage[TokenT], failure: str) -> None:
        """Return the peer's block, and deal out what has come meanwhile. Whether it is right, the answer tells: before
        that it counts for nothing.
        """
        stage.returned, stage.failure = True, failure
        self._orders.give_back(stage.number)
        if not failure and stage.here is not None:
            self._landing.deal(stage.here, stage.part.target)
        self._give(stage)

    def _end(self, stage: Stage[TokenT]) -> None:
        self._stages -= 1
        self._give(stage)

    def _give(self, stage: Stage[TokenT]) -> None:
        if stage.here is not None:
            self._landing.blocks.give(stage.here)
            stage.here = None


def _range(region: int, offset: int, nbytes: int) -> Ranges:
    return Ranges(np.array([region], np.int32), np.array([offset], np.int64), np.array([nbytes], np.int64))
