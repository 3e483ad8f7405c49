"""KV over TCP: the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pegboard.plugins.kv_handoff.api.leases import Counts
from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces, check_read
from pegboard.plugins.kv_handoff.api.transfer import (
    KVTransfer,
    KVTransferContext,
    Ranges,
    TransferError,
    TransferNews,
    TransferState,
)
from pegboard.plugins.transfer_tcp.frames import pack_description, unpack_description
from pegboard.plugins.transfer_tcp.link import Link, Place
from pegboard.plugins.transfer_tcp.options import TcpOptions
from pegboard.plugins.transfer_tcp.reads import Part, Read
from pegboard.plugins.transfer_tcp.source import Source

PART_BYTES = 4 * 2**20
PART_PIECES = 2**16
"""A read is asked for in parts of this size, which the connections to a peer share."""


class TcpTransfer(KVTransfer[TcpOptions]):
    """Serves peers with a thread per connection, and reads from each over a few connections, with a thread each."""

    def __init__(self, options: TcpOptions, ctx: KVTransferContext) -> None:
        super().__init__(options, ctx)
        self._memory = Memory(ctx.regions)
        self._counts = Counts()
        self._source = Source(options, self._memory, self._counts)
        self._links: dict[str, list[Link]] = {}
        self._ending: list[Link] = []
        self._reads: dict[int, Read] = {}
        self._news: deque[TransferNews] = deque()
        self._handles = 0

    @classmethod
    def supports(cls, options: TcpOptions, ctx: KVTransferContext) -> str | None:
        if any(region.buffer is None for region in ctx.regions):
            return "it reads and writes the host's memory, and this KV is on another device"
        return None

    def describe(self) -> bytes:
        return pack_description(self._source.listen(), self._source.token)

    def allow(self, lease: int) -> None:
        self._source.leases.allow(lease)

    def revoke(self, lease: int) -> None:
        self._source.leases.revoke(lease)

    def connect(self, peer: str, host: str, description: bytes) -> None:
        place = Place(host, *unpack_description(description))
        self.disconnect(peer)
        links = self._links[peer] = []
        try:
            for _ in range(self.options.connections):
                links.append(Link(place, self._memory, self.options, self.ctx.clock, self._counts))
        except (OSError, RuntimeError) as error:
            self.disconnect(peer)
            raise TransferError(f"no connection can be made: {error}") from error

    def read(self, peer: str, lease: int, source: Ranges, target: Ranges) -> int:
        links = self._links.get(peer)
        if links is None:
            raise TransferError(f"{peer!r} is not connected")
        check_read(source, target, self._memory.sizes)
        self._handles += 1
        there, here = Pieces(source), Pieces(target)
        cuts = list(there.cuts(PART_BYTES, PART_PIECES))
        if not cuts:
            self._news.append(TransferNews(self._handles, TransferState.DONE))
            return self._handles
        read = self._reads[self._handles] = Read(self._handles, peer, len(cuts), self._news.append)
        for begin, end in cuts:
            link = min(links, key=lambda one: one.given - one.settled)
            link.submit(Part(read, lease, there.part(begin, end), here.part(begin, end), end - begin))
        return read.handle

    def poll(self) -> Sequence[TransferNews]:
        news = []
        while self._news:
            news.append(self._news.popleft())
            self._reads.pop(news[-1].handle, None)
            self._counts.add(f"reads_{news[-1].state.value}_total")
        if self._ending:
            self._ending = [link for link in self._ending if link.thread.is_alive()]
        return news

    def abandon(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is not None:
            read.abandon()
            for link in self._links.get(read.peer, ()):
                link.nudge()

    def disconnect(self, peer: str) -> None:
        links = self._links.pop(peer, [])
        for link in links:
            link.stop()
        self._ending += links

    def stats(self) -> Mapping[str, float]:
        return self._counts.all()

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        self._source.close()
        for link in self._ending:
            link.join()
        self._reads.clear()
        self._news.clear()
