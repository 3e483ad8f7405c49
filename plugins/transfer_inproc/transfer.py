"""Copies between the pools of one process."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pegboard.plugins.kv_handoff.api.pieces import Memory, Pieces, check_read, objection
from pegboard.plugins.kv_handoff.api.transfer import (
    KVTransfer,
    KVTransferContext,
    Ranges,
    TransferError,
    TransferNews,
    TransferState,
)
from pegboard.plugins.transfer_inproc.options import InprocOptions

_MAGIC = b"pegboard inproc "
_TOKEN = 16
_AT_ONCE = 2**20
"""Bytes that are copied while the source is locked."""

_sources: weakref.WeakValueDictionary[bytes, Source] = weakref.WeakValueDictionary()
"""What can be read from in this process, by description."""


@dataclass(eq=False)
class Source:
    """What one engine lets others read. The lock is held while bytes are copied, and to end a lease or all of it."""

    memory: Memory
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[int, object] = field(default_factory=dict)
    closed: bool = False


@dataclass
class Faults:
    """What goes wrong, from now on. A test may change it while reads are under way."""

    delay: float = 0.0
    bytes_per_second: float = 0.0
    linger: float = 0.0
    fail_every: int = 0
    stall_every: int = 0
    shuffle: bool = False
    stalled: bool = False
    """No read gets on."""
    lost: bool = False
    """All reads fail, as if their peers were gone."""


@dataclass(eq=False)
class _Read:
    handle: int
    peer: str
    source: Source | None
    lease: int
    pieces: Pieces
    target: Pieces
    begun: float
    stops_at: int
    """Bytes that it gets at most, where it is to fail or to stall."""
    fails: bool
    wrong: str
    """What is wrong with the source's pieces."""
    fence: object
    """What the lease was when the read began: another one of the same number does not count."""
    at: int = 0
    abandoned: float | None = None


class InprocTransfer(KVTransfer[InprocOptions]):
    """Copies in `poll`, a few MiB at a time. So all times are those of the context's clock, which may be a virtual one.
    `faults` starts as the options say.
    """

    def __init__(self, options: InprocOptions, ctx: KVTransferContext) -> None:
        super().__init__(options, ctx)
        self.faults = Faults(**options.model_dump(exclude={"bytes_per_poll"}))
        self.memory = Memory(ctx.regions)
        self._source = Source(self.memory)
        self._description = _MAGIC + secrets.token_bytes(_TOKEN)
        _sources[self._description] = self._source
        self._peers: dict[str, bytes] = {}
        self._reads: dict[int, _Read] = {}
        self._news: list[TransferNews] = []
        self._handles = 0
        self._polled, self._credit = ctx.clock(), 0.0
        self._buffer = np.empty(_AT_ONCE, np.uint8)
        self._counts: Counter[str] = Counter()

    @classmethod
    def supports(cls, options: InprocOptions, ctx: KVTransferContext) -> str | None:
        if any(region.buffer is None for region in ctx.regions):
            return "it copies what is in the host's memory, and this KV is on another device"
        return None

    # ---- the source -----------------------------------------------------------------------------------------------

    def describe(self) -> bytes:
        return self._description

    def allow(self, lease: int) -> None:
        with self._source.lock:
            self._source.leases.setdefault(lease, object())

    def revoke(self, lease: int) -> None:
        with self._source.lock:
            self._source.leases.pop(lease, None)

    # ---- the reader -----------------------------------------------------------------------------------------------

    def connect(self, peer: str, host: str, description: bytes) -> None:
        if not description.startswith(_MAGIC) or len(description) != len(_MAGIC) + _TOKEN:
            raise TransferError(f"{description[:40]!r} does not describe an engine of this kind")
        self.disconnect(peer)
        self._peers[peer] = bytes(description)

    def read(self, peer: str, lease: int, source: Ranges, target: Ranges) -> int:
        if peer not in self._peers:
            raise TransferError(f"{peer!r} is not connected")
        check_read(source, target, self.memory.sizes)
        self._handles += 1
        self._reads[self._handles] = self._made(self._handles, peer, lease, source, target)
        return self._handles

    def poll(self) -> Sequence[TransferNews]:
        now = self.ctx.clock()
        left = self._allowance(now)
        for one in sorted(self._reads.values(), key=lambda read: read.handle, reverse=self.faults.shuffle):
            left -= self._go_on(one, now, left)
            self._judge(one, now)
        news, self._news = self._news, []
        return news

    def abandon(self, handle: int) -> None:
        one = self._reads.get(handle)
        if one is not None and one.abandoned is None:
            one.abandoned = self.ctx.clock()

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        for one in self._reads.values():
            if one.peer == peer:
                self.abandon(one.handle)

    def stats(self) -> Mapping[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        with self._source.lock:
            self._source.closed = True
        _sources.pop(self._description, None)
        self._peers.clear()
        self._reads.clear()

    def _made(self, handle: int, peer: str, lease: int, source: Ranges, target: Ranges) -> _Read:
        faults, there = self.faults, _sources.get(self._peers[peer])
        fails, stalls = (every and handle % every == 0 for every in (faults.fail_every, faults.stall_every))
        return _Read(
            handle,
            peer,
            there,
            lease,
            Pieces(source),
            Pieces(target),
            self.ctx.clock(),
            stops_at=target.total // 2 if fails or stalls else target.total,
            fails=bool(fails),
            wrong="" if there is None else objection(source, there.memory.sizes),
            fence=None if there is None else there.leases.get(lease),
        )

    # ---- copying --------------------------------------------------------------------------------------------------

    def _allowance(self, now: float) -> int:
        """Return the bytes that may be copied now."""
        most, speed = self.options.bytes_per_poll, self.faults.bytes_per_second
        if not speed:
            return most
        self._credit = min(float(most), self._credit + (now - self._polled) * speed)
        self._polled = now
        return int(self._credit)

    def _go_on(self, one: _Read, now: float, most: int) -> int:
        """Copy at most so many bytes of a read; return how many it were."""
        faults, before = self.faults, one.at
        if faults.stalled or faults.lost or one.source is None or now < one.begun + faults.delay:
            return 0
        end = min(one.stops_at, one.at + most)
        while one.at < end and self._copy(one, min(end, one.at + _AT_ONCE)):
            pass
        copied = one.at - before
        self._credit -= copied
        self._counts["read_bytes_total"] += copied
        return copied

    def _copy(self, one: _Read, end: int) -> bool:
        """Copy up to byte `end` of a read. False where the source does not let it."""
        source = one.source
        assert source is not None
        data = self._buffer[: end - one.at]
        with source.lock:
            if self._refusal(one):
                return False
            source.memory.gather(one.pieces.part(one.at, end), data)
        self.memory.scatter(one.target.part(one.at, end), data)
        one.at = end
        return True

    def _refusal(self, one: _Read) -> str:
        """Return why the source gives nothing more, "" where it does. Under its lock."""
        source = one.source
        if source is None or source.closed or self.faults.lost:
            return "the peer is gone"
        if one.wrong:
            return f"the source of a read: {one.wrong}"
        ended = one.fence is None or source.leases.get(one.lease) is not one.fence
        return "the lease has ended" if ended else ""

    def _judge(self, one: _Read, now: float) -> None:
        """End a read that is through, was refused, or is abandoned for long enough."""
        if one.at == one.pieces.total and one.abandoned is None and one.stops_at == one.at:
            self._end(one, TransferState.DONE)
        elif one.abandoned is not None:
            if now >= one.abandoned + self.faults.linger:
                self._end(one, TransferState.GONE)
        elif one.fails and one.at >= one.stops_at:
            self._end(one, TransferState.FAILED, "on demand")
        else:
            self._end_if_refused(one)

    def _end_if_refused(self, one: _Read) -> None:
        if one.source is None:
            self._end(one, TransferState.FAILED, "the peer is gone")
            return
        with one.source.lock:
            why = self._refusal(one)
        if why:
            self._end(one, TransferState.FAILED, why)

    def _end(self, one: _Read, state: TransferState, reason: str = "") -> None:
        del self._reads[one.handle]
        self._counts[f"reads_{state.value}_total"] += 1
        self._news.append(TransferNews(one.handle, state, reason))
