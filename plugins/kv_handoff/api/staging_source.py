"""The source of staged reads: a thread that collects pieces in blocks, which peers read as one range each."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.listening import receive
from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces, objection
from pegboard.plugins.kv_handoff.api.protocol import (
    ANSWER,
    AT_ONCE,
    MOST_PIECES,
    NUMBER,
    ORDER,
    RANGE,
    REQUEST,
    RETURN,
    BadFrame,
    Status,
    unpack_ranges,
)

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.kv_handoff.api.blocks import Blocks
    from pegboard.plugins.kv_handoff.api.leases import Counts, Lease, Leases
    from pegboard.plugins.kv_handoff.api.transfer import Ranges

logger = logging.getLogger(__name__)

CHUNK = 2**20
"""Bytes that are collected between two looks at the lease."""
MOST_WAITING = 32 * 2**20
"""Bytes of all orders that wait. Beyond that a reader which has no block is not listened to."""
LOOK = 0.05
"""Seconds between two looks for blocks to take back."""


@dataclass(eq=False)
class _Reader:
    """A connection: its orders that are not collected yet, and blocks by order, with when they were ready."""

    connection: socket.socket
    waiting: int = 0
    held: dict[int, tuple[int, float]] = field(default_factory=dict)
    last: int = -1
    gone: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class _Order:
    reader: _Reader
    number: int
    lease: Lease
    ranges: Ranges


class Collector:
    """Takes orders of connections, each of which is served by a thread of its own, and collects one after the other.

    A block belongs to an order from the moment it is taken for it until the reader returns it, its connection ends, or
    `seconds` have passed and another order waits. In the last two cases the reader may still be reading, and what it
    reads is wrong. It learns that by its return, which is answered RECALLED or not at all. So a block can be given to
    the next order at once: a reader uses only what it has returned in time.
    """

    def __init__(
        self, memory: Memory, blocks: Blocks, leases: Leases, counts: Counts, clock: Clock, seconds: float
    ) -> None:
        self._memory = memory
        self._blocks = blocks
        self._leases = leases
        self._counts = counts
        self._clock = clock
        self._seconds = seconds
        self._changed = threading.Condition()
        self._readers: set[_Reader] = set()
        self._queue: deque[_Order] = deque()
        self._bytes = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the orders that wait or are being collected."""
        return self._bytes

    def start(self) -> None:
        """Begin to collect, from the first call on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-collect", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End. When this returns nothing reads the memory."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- a connection's thread ------------------------------------------------------------------------------------

    def serve(self, connection: socket.socket) -> None:
        """Take orders and returns, until the connection ends. Raises OSError and BadFrame."""
        reader, kind = _Reader(connection), bytearray(1)
        with self._changed:
            self._readers.add(reader)
        try:
            while True:
                connection.settimeout(None)
                if not connection.recv_into(kind):
                    return
                if kind == ORDER:
                    self._take(reader)
                elif kind == RETURN:
                    self._take_back(reader)
                else:
                    raise BadFrame(f"the kind {bytes(kind)!r}")
        finally:
            self._leave(reader)

    def _take(self, reader: _Reader) -> None:
        header = bytearray(REQUEST.size)
        receive(reader.connection, memoryview(header), self._seconds)
        number, lease, total, count = REQUEST.unpack(header)
        if not 1 <= count <= MOST_PIECES or not count <= total <= self._blocks.size:
            raise BadFrame(f"{count} pieces with {total} bytes")
        self._make_room(reader, number, RANGE * count)
        taken = False
        try:
            body = bytearray(RANGE * count)
            receive(reader.connection, memoryview(body), self._seconds)
            ranges, held = unpack_ranges(body, count, total), self._leases.get(lease)
            if held is None:
                refused = Status.ENDED
            elif objection(ranges, self._memory.sizes):
                refused = Status.BEYOND
            else:
                taken = True
                with self._changed:
                    self._queue.append(_Order(reader, number, held, ranges))
                    self._changed.notify_all()
        finally:
            if not taken:
                self._forget(reader, RANGE * count)
        if not taken:
            self._answer(reader, number, refused)

    def _make_room(self, reader: _Reader, number: int, nbytes: int) -> None:
        """Count an order, once there is room for it. A reader with blocks never waits here: it is to return them."""
        with self._changed:
            if number <= reader.last or reader.waiting + len(reader.held) >= AT_ONCE:
                raise BadFrame(f"the order {number} after {reader.last}, while {AT_ONCE} may be unsettled")
            self._changed.wait_for(lambda: self._closed or reader.held or self._bytes + nbytes <= MOST_WAITING)
            if self._closed:
                raise ConnectionAbortedError("closed")
            reader.last = number
            reader.waiting += 1
            self._bytes += nbytes

    def _forget(self, reader: _Reader, nbytes: int) -> None:
        with self._changed:
            reader.waiting -= 1
            self._bytes -= nbytes
            self._changed.notify_all()

    def _take_back(self, reader: _Reader) -> None:
        data = bytearray(NUMBER.size)
        receive(reader.connection, memoryview(data), self._seconds)
        (number,) = NUMBER.unpack(data)
        with self._changed:
            held = reader.held.pop(number, None)
            if held is not None:
                self._blocks.give(held[0])
                self._changed.notify_all()
        self._answer(reader, number, Status.RECALLED if held is None else Status.RETURNED)

    def _leave(self, reader: _Reader) -> None:
        with self._changed:
            reader.gone = True
            self._readers.discard(reader)
            for block, _ in reader.held.values():
                self._blocks.give(block)
            reader.held.clear()
            for order in [order for order in self._queue if order.reader is reader]:
                self._queue.remove(order)
                self._bytes -= RANGE * len(order.ranges)
            self._changed.notify_all()

    @staticmethod
    def _answer(reader: _Reader, number: int, status: Status, block: int = 0) -> None:
        with reader.sending, contextlib.suppress(OSError):  # its own thread notices the end of a connection
            reader.connection.sendall(ANSWER.pack(number, status, block))

    # ---- the collecting thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (found := self._next()) is not None:
            order, block = found
            try:
                status = self._collect(order, block)
            except Exception:
                logger.exception("collecting pieces for a peer has failed")
                status = Status.FAILED
            with self._changed:
                if status is Status.READY and not order.reader.gone:
                    order.reader.held[order.number] = block, self._clock()
                else:
                    self._blocks.give(block)
                # Under the same lock: the reader's next order counts this one, and may not count it twice.
                self._forget(order.reader, RANGE * len(order.ranges))
            self._answer(order.reader, order.number, status, block)

    def _next(self) -> tuple[_Order, int] | None:
        """Wait for an order and a block for it; None at the end."""
        with self._changed:
            while not self._closed:
                block = self._block() if self._queue else None
                if block is not None:
                    return self._queue.popleft(), block
                self._changed.wait(LOOK if self._queue else None)
        return None

    def _block(self) -> int | None:
        """Return a free block, or one that has been held for too long."""
        block = self._blocks.take()
        held = [(since, number, reader) for reader in self._readers for number, (_, since) in reader.held.items()]
        if block is not None or not held:
            return block
        since, number, reader = min(held, key=lambda one: one[0])
        if self._clock() - since < self._seconds:
            return None
        self._counts.add("recalled_blocks_total")
        return reader.held.pop(number)[0]

    def _collect(self, order: _Order, block: int) -> Status:
        """Fill a block. Return READY where the lease has lasted all the while, and else ENDED."""
        pieces, out = Pieces(order.ranges), self._blocks.view(block)
        for begin, end in pieces.cuts(CHUNK, CHUNK):
            if self._closed or not order.lease.lasts:
                return Status.ENDED
            self._memory.gather(pieces.part(begin, end), out[begin:end])
        self._counts.add("collected_bytes_total", pieces.total)
        return Status.READY if order.lease.lasts else Status.ENDED
