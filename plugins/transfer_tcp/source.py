"""The source: threads that send what peers ask for, as long as its lease lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.leases import Leases
from pegboard.plugins.kv_handoff.api.listening import Listener, receive
from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces, objection
from pegboard.plugins.kv_handoff.api.protocol import RANGE, REQUEST, BadFrame, unpack_ranges
from pegboard.plugins.transfer_tcp.frames import ANSWER, END, MAGIC, MAX_RANGES, MAX_TOTAL, Status
from pegboard.plugins.transfer_tcp.streams import CHUNK, MOST_BUFFERS, Chunks, beyond, new_buffer

if TYPE_CHECKING:
    import socket

    from pegboard.plugins.kv_handoff.api.leases import Counts
    from pegboard.plugins.kv_handoff.api.transfer import Ranges
    from pegboard.plugins.transfer_tcp.options import TcpOptions

_ZEROS = bytes(CHUNK)


class Source:
    """Listens once it has been described, and has a thread for each connection."""

    def __init__(self, options: TcpOptions, memory: Memory, counts: Counts) -> None:
        self.leases = Leases()
        self._options = options
        self._memory = memory
        self._counts = counts
        self._listener = Listener(MAGIC, self._answer_all, counts, options.connect_timeout)

    @property
    def token(self) -> bytes:
        """What peers show at the beginning."""
        return self._listener.token

    def listen(self) -> int:
        """Listen, from the first call on; return the port. Raises OSError, with what to do."""
        return self._listener.listen(self._options.listen_host, self._options.listen_port)

    def close(self) -> None:
        """End all connections and threads. When this returns nothing reads the memory."""
        self._listener.close()

    def _answer_all(self, connection: socket.socket) -> None:
        header, buffer = bytearray(REQUEST.size), new_buffer()
        while True:
            connection.settimeout(None)
            if not connection.recv_into(memoryview(header)[:1]):
                return
            receive(connection, memoryview(header)[1:], self._options.timeout)
            number, lease, total, count = REQUEST.unpack(header)
            if count > MAX_RANGES or total > MAX_TOTAL:
                raise BadFrame(f"{count} pieces with {total} bytes")
            body = bytearray(RANGE * count)
            receive(connection, memoryview(body), None, self._options.timeout)
            ranges = unpack_ranges(body, count, total)
            self._answer(connection, number, lease, ranges, buffer)

    def _answer(self, connection: socket.socket, number: int, lease: int, ranges: Ranges, buffer: memoryview) -> None:
        """Send what was asked for, or why not."""
        connection.settimeout(self._options.timeout)
        held = self.leases.get(lease)
        if held is None or objection(ranges, self._memory.sizes):
            status = Status.ENDED if held is None else Status.BEYOND
            connection.sendall(ANSWER.pack(number, status, 0))
            return
        pieces = Pieces(ranges)
        connection.sendall(ANSWER.pack(number, Status.OK, pieces.total))
        chunks = Chunks(self._memory, pieces, buffer)
        sent = 0
        while held.lasts and (buffers := chunks.next_filled()):
            while buffers and held.lasts:
                count = connection.sendmsg(buffers[:MOST_BUFFERS])
                buffers = beyond(buffers, count)
                sent += count
        status = Status.OK if held.lasts else Status.ENDED
        self._counts.add("served_bytes_total", sent)
        while sent < pieces.total:
            sent += connection.send(memoryview(_ZEROS)[: pieces.total - sent])
        connection.sendall(END.pack(number, status))
