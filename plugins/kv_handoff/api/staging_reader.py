"""The reader of staged reads: many small pieces in few large ones, by way of a block there and one here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import msgspec
import numpy as np

from pegboard.plugins.kv_handoff.api.links import Limits, Part, TokenT, Unanswered, Wire
from pegboard.plugins.kv_handoff.api.listening import TOKEN, receive, unreached
from pegboard.plugins.kv_handoff.api.pieces import Pieces, pair
from pegboard.plugins.kv_handoff.api.protocol import (
    ANSWER,
    AT_ONCE,
    MAGIC,
    MOST_PIECES,
    NUMBER,
    ORDER,
    REASONS,
    RETURN,
    Status,
    pack_request,
)
from pegboard.plugins.kv_handoff.api.transfer import Ranges, TransferError

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.kv_handoff.api.blocks import Blocks
    from pegboard.plugins.kv_handoff.api.leases import Counts
    from pegboard.plugins.kv_handoff.api.pieces import Memory

logger = logging.getLogger(__name__)

CONNECT = 2.0
"""Seconds that connecting may take."""
AGAIN = 10.0
"""Seconds after which it is tried again."""


class StagingPlace(msgspec.Struct, frozen=True, array_like=True):
    """What a source says of its staging: where orders are taken, and its blocks from `address` on."""

    port: int
    token: bytes
    address: int
    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def check(self) -> None:
        """Raise TransferError where it cannot be: it came over the network."""
        bounds = (self.port, 1, 2**16 - 1), (self.blocks, 1, 2**16), (self.block_bytes, 1, 2**32)
        where = self.address, 0, 2**64 - self.nbytes
        if len(self.token) != TOKEN or any(not least <= one <= most for one, least, most in (*bounds, where)):
            raise TransferError("a description has a staging area that cannot be one")


class Orders:
    """Sends orders and takes answers, and never waits but for connecting. Where the connection is lost all that was
    under way fails, and later orders make a new one.
    """

    def __init__(self, host: str, place: StagingPlace, clock: Clock, seconds: float) -> None:
        self._host = host
        self._place = place
        self._clock = clock
        self._seconds = seconds
        self._socket: socket.socket | None = None
        self._unsent = b""
        self._received = b""
        self._waiting: set[int] = set()
        """Orders to which an answer is due."""
        self._answers: dict[int, tuple[Status, int]] = {}
        self._lost = TransferError("there is no connection for staged reads yet")
        self._heard = 0.0
        self._next_try = 0.0
        self._told = False

    def reachable(self) -> bool:
        """Connect, where that is needed and was not tried in vain just now. Return whether there is a connection."""
        if self._socket is None and self._clock() >= self._next_try:
            try:
                self._socket = self._connected()
            except OSError as error:
                self._next_try = self._clock() + AGAIN
                tell = logger.debug if self._told else logger.warning
                why = f"{error}{unreached(self._host)}"
                tell("%s does not collect pieces for reads, which go piece by piece: %s", self._host, why)
                self._told = True
        return self._socket is not None

    def _connected(self) -> socket.socket:
        made = socket.create_connection((self._host, self._place.port), timeout=CONNECT)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.sendall(MAGIC + self._place.token)
            welcome = bytearray(len(MAGIC))
            receive(made, memoryview(welcome), CONNECT)
            if welcome != MAGIC:
                raise ConnectionRefusedError("what answers is not a source of KV")
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        return made

    def order(self, number: int, part: Part) -> None:
        """Have the pieces of a part collected."""
        self._say(number, ORDER + pack_request(number, part.lease, part.source))

    def give_back(self, number: int) -> None:
        """Return the block of an order."""
        self._say(number, RETURN + NUMBER.pack(number))

    def answer(self, number: int) -> int | None:
        """Return the answer to what was said last of an order: its block, or None where there is no answer yet. Raises
        TransferError where it was refused, and where the connection is lost.
        """
        self._exchange()
        if number in self._answers:
            status, block = self._answers.pop(number)
            if status in REASONS:
                raise TransferError(REASONS[status])
            return block
        if number not in self._waiting:
            raise self._lost
        if self._clock() - self._heard > self._seconds:
            self._lose(Unanswered(f"no answer to an order for {self._seconds:g} s"))
            raise self._lost
        return None

    def close(self) -> None:
        """End the connection."""
        self._lose(TransferError("the connection for staged reads is closed"))

    def _lose(self, why: TransferError) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._unsent, self._received, self._lost = None, b"", b"", why
        self._waiting.clear()
        self._answers.clear()

    def _say(self, number: int, data: bytes) -> None:
        if self._socket is not None:
            if not self._waiting:
                self._heard = self._clock()
            self._waiting.add(number)
            self._unsent += data
            self._exchange()

    def _exchange(self) -> None:
        """Send and receive what can be now."""
        for work in (self._send, self._receive):
            try:
                with contextlib.suppress(BlockingIOError):
                    work()
            except OSError as error:
                self._lose(TransferError(f"the connection for staged reads is lost: {error}"))

    def _send(self) -> None:
        while self._socket is not None and self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _receive(self) -> None:
        while self._socket is not None:
            self._take(self._socket.recv(4096))

    def _take(self, data: bytes) -> None:
        """Take what has come. Raises OSError where that is not what may come here."""
        if not data:
            raise ConnectionResetError("closed by the peer")
        self._received += data
        self._heard = self._clock()
        while len(self._received) >= ANSWER.size:
            number, status, block = ANSWER.unpack_from(self._received)
            self._received = self._received[ANSWER.size :]
            if number not in self._waiting or status not in tuple(Status) or block >= self._place.blocks:
                raise ConnectionAbortedError(f"the peer answers {status}, {block} to {number}")
            self._waiting.discard(number)
            self._answers[number] = Status(status), block


class Landing:
    """Where small pieces are read to, before they are dealt out to the regions: blocks of the region `region`. Reads
    whose pieces have fewer than `below` bytes on average go there, and a step of theirs takes `seconds` at most.
    """

    def __init__(
        self, blocks: Blocks, region: int, regions: Memory, counts: Counts, below: int, clock: Clock, seconds: float
    ) -> None:
        self.blocks = blocks
        self.region = region
        self.below = below
        self.clock = clock
        self.seconds = seconds
        self._regions = regions
        self._counts = counts
        self._dealing = threading.Lock()
        self._closed = False

    def deal(self, block: int, target: Ranges) -> None:
        """Fill pieces of the regions out of a block. Raises TransferError after the end."""
        with self._dealing:
            if self._closed:
                raise TransferError("the engine is closed")
            self._regions.scatter(target, self.blocks.view(block)[: target.total])
        self._counts.add("staged_bytes_total", target.total)

    def close(self) -> None:
        """End. When this returns nothing is written to the regions."""
        with self._dealing:
            self._closed = True


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
        pieces, _ = pair(whole.source, whole.target)
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
