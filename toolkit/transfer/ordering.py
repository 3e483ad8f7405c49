"""A reader's connection to the source of staged reads, used by the thread that reads."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.kv_transfer import TransferError
from pegboard.toolkit.transfer.links import Unanswered
from pegboard.toolkit.transfer.listening import TOKEN, receive
from pegboard.toolkit.transfer.orders import ANSWER, MAGIC, NUMBER, ORDER, REASONS, RETURN, Status
from pegboard.toolkit.transfer.requests import pack_request

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.toolkit.transfer.links import Part

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
                tell("%s does not collect pieces for reads, which go piece by piece: %s", self._host, error)
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
