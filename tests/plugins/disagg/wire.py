"""A network and a transfer engine in virtual time: nothing moves unless the test moves it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.disagg.events import Address, Event, Failed, Lost, Opened, Said
from pegboard.plugins.disagg.handshake import Peer
from pegboard.plugins.disagg.messages import AboutRooms, Facts
from pegboard.plugins.kv_handoff.api.transfer import (
    KVTransfer,
    KVTransferContext,
    Ranges,
    Region,
    TransferError,
    TransferNews,
    TransferState,
)

SLOT_BYTES = (4, 8)
"""Of the regions K and V of the only layer."""
HEADS = 2
FACTS = Facts(b"same", {"model": "toy"}, "VirtualTransfer", (HEADS, HEADS), (2, 4))


def wanted(value: int, region: int, size: int) -> bytes:
    """Return what a slot holds of a value."""
    return ((value + region) % 2**32).to_bytes(4, "big") * (size // 4)


class Memory:
    """A KV pool's buffers. `owner` names who has each slot, and `cached` are shared: who else writes there is wrong."""

    def __init__(self, slots: int) -> None:
        self.buffers = [np.zeros(slots * each, np.uint8) for each in SLOT_BYTES]
        self.owner: list[str | None] = [None] * slots
        self.cached: set[int] = set()

    @property
    def regions(self) -> tuple[Region, ...]:
        pairs = zip(self.buffers, SLOT_BYTES, strict=True)
        return tuple(Region(1, int(buffer.nbytes), each, HEADS, "cpu", buffer.data) for buffer, each in pairs)

    def put(self, slot: int, value: int) -> None:
        for region, (buffer, each) in enumerate(zip(self.buffers, SLOT_BYTES, strict=True)):
            buffer[slot * each : (slot + 1) * each] = np.frombuffer(wanted(value, region, each), np.uint8)

    def holds(self, slot: int, value: int) -> bool:
        pairs = enumerate(zip(self.buffers, SLOT_BYTES, strict=True))
        return all(
            bytes(buffer[slot * size : (slot + 1) * size]) == wanted(value, region, size)
            for region, (buffer, size) in pairs
        )


@dataclass(eq=False)
class Read:
    """A read under way: pairs of bytes that remain to be copied, and who owned the target when it began."""

    handle: int
    source: VirtualTransfer
    target: VirtualTransfer
    pieces: list[tuple[int, int, int, int]]
    owners: dict[int, str | None]
    lease: int
    abandoned: bool = False
    stuck: bool = False


class VirtualTransfer(KVTransfer[NoOptions]):
    """One-sided: what a read copies is what is there at that moment, whatever its lease is worth by then."""

    def __init__(self, memory: Memory, clock: ManualClock, peers: dict[str, VirtualTransfer]) -> None:
        super().__init__(NoOptions(), KVTransferContext(memory.regions, clock))
        self.memory, self.peers = memory, peers
        self.reads: dict[int, Read] = {}
        self.leases: set[int] = set()
        self.known: set[str] = set()
        self.news: list[TransferNews] = []
        self.numbers = itertools.count(1)
        self.dead = False

    def describe(self) -> bytes:
        return b"virtual"

    def allow(self, lease: int) -> None:
        assert lease not in self.leases, "a lease is given once"
        self.leases.add(lease)

    def revoke(self, lease: int) -> None:
        self.leases.discard(lease)

    def connect(self, peer: str, host: str, description: bytes) -> None:
        if description != b"virtual":
            raise TransferError("not a description")
        self.known.add(peer)

    def read(self, peer: str, lease: int, source: Ranges, target: Ranges) -> int:
        if peer not in self.known:
            raise TransferError(f"{peer} is not connected")
        if source.total != target.total:
            raise ValueError("the two differ in bytes")
        handle = next(self.numbers)
        pairs = zip(_bytes(source), _bytes(target), strict=True)
        pieces = [(sr, so, tr, to) for (sr, so), (tr, to) in pairs]
        slots = {to // SLOT_BYTES[tr] for _, _, tr, to in pieces}
        owners = {slot: self.memory.owner[slot] for slot in slots}
        self.reads[handle] = Read(handle, self.peers[peer], self, pieces, owners, lease)
        return handle

    def poll(self) -> Sequence[TransferNews]:
        news, self.news = self.news, []
        return news

    def abandon(self, handle: int) -> None:
        if handle in self.reads:
            self.reads[handle].abandoned = True

    def disconnect(self, peer: str) -> None:
        self.known.discard(peer)
        for read in self.reads.values():
            read.abandoned |= read.source is self.peers[peer]

    def close(self) -> None:
        self.reads.clear()

    # What the test decides.

    def copy(self, read: Read, part: float) -> None:
        """Copy a part of what remains, from wherever in it."""
        for _ in range(max(1, int(len(read.pieces) * part))):
            if not read.pieces:
                return
            source_region, source_offset, region, offset = read.pieces.pop()
            slot = offset // SLOT_BYTES[region]
            owner = self.memory.owner[slot]
            assert owner is not None, f"slot {slot} is free and written to"
            assert slot not in self.memory.cached, f"slot {slot} is shared with others and written to"
            assert owner == read.owners[slot], f"slot {slot} of {owner!r} is written to for {read.owners[slot]!r}"
            self.memory.buffers[region][offset] = read.source.memory.buffers[source_region][source_offset]

    def end(self, read: Read, state: TransferState) -> None:
        if state is TransferState.DONE:
            self.copy(read, 1.0)
        del self.reads[read.handle]
        self.news.append(TransferNews(read.handle, state, "as the test wants"))


def _bytes(ranges: Ranges) -> list[tuple[int, int]]:
    pieces = zip(ranges.region.tolist(), ranges.offset.tolist(), ranges.nbytes.tolist(), strict=True)
    return [(region, at) for region, offset, nbytes in pieces for at in range(offset, offset + nbytes)]


@dataclass(eq=False)
class Wire:
    """A connection with both its ends. What was said waits in a queue for each side until it is delivered."""

    decode: End
    prefill: End
    link: int
    to_decode: deque[AboutRooms] = field(default_factory=deque)
    to_prefill: deque[AboutRooms] = field(default_factory=deque)
    broken: bool = False
    told: set[str] = field(default_factory=set)


class End:
    """One server's network: what it sees and says. `change` may replace a message on its way."""

    def __init__(self, net: Net, instance: bytes, role: str) -> None:
        self.net, self.instance, self.role = net, instance, role
        self.facts = FACTS
        self.inbox: list[Event] = []
        self.dialled: set[Address] = set()
        self.change: Callable[[AboutRooms], Sequence[AboutRooms]] = lambda message: [message]
        self.before: Callable[[], None] = lambda: None
        """Called before its events are told."""
        self.hear: Callable[[AboutRooms], AboutRooms] = lambda message: message

    def dial(self, address: Address) -> None:
        self.dialled.add(address)

    def send(self, link: int, message: AboutRooms) -> None:
        for one in self.change(message):
            self.net.send(self, link, one)

    def events(self) -> Sequence[Event]:
        self.before()
        events, self.inbox = self.inbox, []
        return events


class Net:
    """All connections. Within one, messages stay in order; between two, nothing is said about order."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.numbers = itertools.count(1)
        self.said: list[tuple[End, End, AboutRooms]] = []
        """Everything that was delivered, so that it can be said once more: from, to, what."""

    def open(self, decode: End, prefill: End, address: Address) -> None:
        link = next(self.numbers)
        self.wires.append(Wire(decode, prefill, link))
        decode.dialled.discard(address)
        decode.inbox.append(Opened(link, address, Peer("prefill", prefill.instance, prefill.facts, b"virtual")))
        prefill.inbox.append(Opened(link, None, Peer("decode", decode.instance, decode.facts)))

    def refuse(self, decode: End, address: Address, reason: str) -> None:
        decode.dialled.discard(address)
        decode.inbox.append(Failed(address, reason))

    def send(self, end: End, link: int, message: AboutRooms) -> None:
        for wire in self.wires:
            if wire.link == link and not wire.broken and end in (wire.decode, wire.prefill):
                (wire.to_prefill if end is wire.decode else wire.to_decode).append(message)

    def deliver(self, wire: Wire, role: str) -> None:
        queue = wire.to_decode if role == "decode" else wire.to_prefill
        here, there = (wire.decode, wire.prefill) if role == "decode" else (wire.prefill, wire.decode)
        if queue and role not in wire.told:
            message = queue.popleft()
            here.inbox.append(Said(wire.link, here.hear(message)))
            self.said = [*self.said[-50:], (there, here, message)]

    def repeat(self, wire: Wire, number: int) -> None:
        """Say once more what these two have said before, perhaps over another connection."""
        known = [one for one in self.said if {one[0], one[1]} == {wire.decode, wire.prefill}]
        if known and not wire.broken:
            _, here, message = known[number % len(known)]
            here.inbox.append(Said(wire.link, here.hear(message)))

    def lose(self, wire: Wire, role: str, *, silent: bool = False) -> None:
        """Let one side learn that it is broken. What is on its way to it may come before that, or never. `silent`: the
        other side does not answer to pings.
        """
        wire.broken = True
        if role not in wire.told:
            wire.told.add(role)
            (wire.decode if role == "decode" else wire.prefill).inbox.append(Lost(wire.link, "broken", silent))
        if len(wire.told) == 2 and wire in self.wires:
            self.wires.remove(wire)
