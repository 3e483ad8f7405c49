"""The answer to one request, as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces
from pegboard.plugins.kv_handoff.api.protocol import BadFrame
from pegboard.plugins.transfer_tcp.frames import ANSWER, END, REASONS, Status
from pegboard.plugins.transfer_tcp.streams import CHUNK, MOST_BUFFERS, Chunks, Filling

if TYPE_CHECKING:
    from pegboard.plugins.transfer_tcp.reads import Part


class Incoming:
    """Says where the next bytes of an answer go to. The bytes of a part that has ended go nowhere."""

    def __init__(self, number: int, part: Part, memory: Memory, buffer: memoryview) -> None:
        self.part = part
        self.complete = False
        self._number = number
        self._memory = memory
        self._buffer = buffer
        self._frame = memoryview(bytearray(ANSWER.size))
        self._got = 0
        self._left = 0
        self._chunks: Chunks | None = None
        self._filling: Filling | None = None
        self._advance: Callable[[int], None] = self._in_answer

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes go to, at least one byte."""
        if self._advance != self._in_data:
            return [self._frame[self._got :]]
        if self.part.ended:
            self._filling = None
            return [self._buffer[: min(CHUNK, self._left)]]
        assert self._filling is not None
        return self._filling.buffers[:MOST_BUFFERS]

    def advance(self, count: int) -> None:
        """Take note of `count` bytes there. Raises BadFrame."""
        self._advance(count)

    def _in_answer(self, count: int) -> None:
        self._got += count
        if self._got < ANSWER.size:
            return
        number, status, total = ANSWER.unpack(self._frame)
        self._check(number, status)
        if status != Status.OK:
            self._end(status)
            return
        if total != self.part.nbytes:
            raise BadFrame(f"{total} bytes come where {self.part.nbytes} were asked for")
        self._left = total
        self._chunks = Chunks(self._memory, Pieces(self.part.target), self._buffer)
        self._filling = self._chunks.next_empty()
        self._advance = self._in_data

    def _in_data(self, count: int) -> None:
        self._left -= count
        if self._filling is not None and self._filling.advance(count):
            assert self._chunks is not None
            self._filling = self._chunks.next_empty()
        if not self._left:
            self._frame, self._got = memoryview(bytearray(END.size)), 0
            self._advance = self._in_end

    def _in_end(self, count: int) -> None:
        self._got += count
        if self._got == END.size:
            number, status = END.unpack(self._frame)
            self._check(number, status)
            self._end(status)

    def _check(self, number: int, status: int) -> None:
        if number != self._number:
            raise BadFrame(f"an answer to request {number} comes where that to {self._number} is due")
        if status not in tuple(Status):
            raise BadFrame(f"the status {status}")

    def _end(self, status: int) -> None:
        self.complete = True
        self.part.end("" if status == Status.OK else REASONS[Status(status)])
