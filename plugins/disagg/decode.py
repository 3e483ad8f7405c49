"""The decode side of rooms: a request waits until its KV has been read, and prefill has confirmed it. No I/O here."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pegboard.core.interfaces.admission_gate import OPEN, GateState, Verdict
from pegboard.plugins.disagg.answers import TOO_MANY
from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.events import Address, Failed, Lost, Network, Opened, Said, by_state
from pegboard.plugins.disagg.messages import Drop, Fail, FromPrefill, Gone, Kept, Ready, RoomKey, Taken, Want, key_of
from pegboard.plugins.disagg.ranges import NotRuns, Runs
from pegboard.plugins.disagg.requests import Malformed, asked_by, prompt_digest
from pegboard.plugins.kv_handoff.api import Arrived, KVVerdict
from pegboard.plugins.kv_handoff.api.transfer import TransferError

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.disagg.options import DisaggOptions
    from pegboard.plugins.disagg.reading import Reader
    from pegboard.plugins.kv_handoff.api import KVReservation

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
"""How often a read that has failed is begun again, within an epoch."""


MAX_TOKEN = 2**31


class _Open(NamedTuple):
    """A connection that is open: to which address, and to which run of the server."""

    address: Address
    instance: bytes


class DecodeSide:
    """Requests wait here until their KV is in their memory. What fails ends in a verdict, and nothing waits for another
    room.
    """

    def __init__(self, options: DisaggOptions, network: Network, reader: Reader) -> None:
        self._options, self._network, self._reader = options, network, reader
        self._rooms: dict[str, DecodeRoom] = {}
        self._by_key: dict[tuple[Address, RoomKey], DecodeRoom] = {}
        self._links: dict[int, _Open] = {}
        self._attempts = itertools.count(1)
        self._held: Counter[str] = Counter()
        """Rooms of each key that have not failed."""
        self.counts: Counter[str] = Counter()

    # ---- the gate -------------------------------------------------------------------------------------------------

    def enter(self, req: Req) -> Verdict:
        self.pump()
        try:
            asked = asked_by(req)
            address = asked.address(self._options.default_port)
            if address is None:
                raise Malformed("bootstrap_host", "is missing: it says where the prefill server is")
        except Malformed as error:
            return error.verdict()
        if not self._options.may_connect(*address):
            text = f"{address} is not among the prefill servers that this server may connect to (option `peers`)"
            return Verdict.failed(text, code="peer_not_allowed", param="bootstrap_host")
        if (address, asked.key) in self._by_key:
            text = f"the room {asked.key} is in use by another request"
            return Verdict.failed(text, status=409, code="room_in_use", param="bootstrap_room")
        if len(self._rooms) >= self._options.max_rooms and not self._make_way(req.principal):
            return Verdict.failed("too many requests wait for their KV", status=503, code="too_many_rooms")
        attempt = next(self._attempts)
        room = DecodeRoom(asked.key, req.rid, address, req.input_len, prompt_digest(req), attempt)
        room.principal = req.principal
        self._held[req.principal] += 1
        self._rooms[req.rid] = self._by_key[address, asked.key] = room
        link = next((link for link, one in self._links.items() if one.address == address), None)
        if link is None:
            self._network.dial(address)
        else:
            self._ask(room, link)
        return room.verdict or Verdict.blocked(
            f"waiting for the prefill server {address} to say that it has this room's request"
        )

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        self.pump()
        news: dict[str, Verdict] = {}
        for req in blocked:
            room = self._rooms.get(req.rid)
            if room is None or room.verdict is None:
                continue
            news[req.rid], room.verdict = room.verdict, None
            if news[req.rid].state is GateState.OPEN:
                self.counts["rooms_arrived" if room.failure is None else "rooms_computed_here"] += 1
                self._forget(room)
        return news

    def reserved(self, req: Req, reservation: KVReservation) -> None:
        room = self._rooms.get(req.rid)
        if room is not None:
            room.reserved(reservation)
            self.pump()

    def cancel(self, req: Req) -> bool:
        room = self._rooms.get(req.rid)
        if room is None:
            return False
        self._drop(room, "the request has ended on the decode server")
        self._forget(room)
        return self._reader.leave(room)

    def finished(self, req: Req) -> bool:
        return False

    def released(self) -> Iterable[str]:
        self.pump()
        return self._reader.safe()

    def drop(self, req: Req) -> None:
        self._reader.forget(req.rid)

    # ---- the network ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what the network and the transfer engine have to say, and go on with every room."""
        for event in self._network.events():
            if isinstance(event, Opened) and event.address is not None:
                self._opened(event, event.address)
            elif isinstance(event, Lost):
                self._lost(event)
            elif isinstance(event, Failed):
                for room in self._at(event.address):
                    self._lose(room, event.reason, event.status, event.code)
            elif isinstance(event, Said) and isinstance(event.message, FromPrefill):
                self._hear(event.link, event.message)
        for room, reason in self._reader.poll(self._rooms.values()):
            self._read_failed(room, reason)
        for room in list(self._rooms.values()):
            self._go_on(room)

    def rooms(self) -> list[dict[str, object]]:
        """Return the rooms with their states, for operators."""
        return [
            {"room": room.key.room, "index": room.key.answer, "state": room.state.value, "peer": str(room.address)}
            for room in self._rooms.values()
        ]

    def stats(self) -> Mapping[str, float]:
        self.pump()
        return {
            "connections": len(self._links),
            "rooms": len(self._rooms),
            **by_state(room.state for room in self._rooms.values()),
            "reads": self._reader.under_way,
            "seats_quarantined": self._reader.quarantined,
            "bytes_read_total": self._reader.bytes_begun,
            **{f"{name}_total": count for name, count in self.counts.items()},
        }

    def _opened(self, event: Opened, address: Address) -> None:
        instance = event.peer.instance
        for link in [link for link, one in self._links.items() if one.address == address]:
            del self._links[link]
        self._links[event.link] = _Open(address, instance)
        try:
            self._reader.meet(instance, address.host, event.peer.description)
        except TransferError as error:
            for room in self._at(address):
                self._lose(room, f"the prefill server {address} cannot be read from: {error}")
            return
        for room in self._at(address):
            self._ask(room, event.link)
        self._reader.keep(
            {one.instance for one in self._links.values()} | {one.instance for one in self._rooms.values()}
        )

    def _lost(self, event: Lost) -> None:
        known = self._links.pop(event.link, None)
        if known is None:
            return
        rooms = [room for room in self._at(known.address) if room.link == event.link]
        for room in rooms:
            room.link = None
            if event.silent:
                self._lose(room, f"the prefill server {room.address} does not answer: {event.reason}")
        if any(room.failure is None for room in rooms):
            self._network.dial(known.address)

    def _ask(self, room: DecodeRoom, link: int) -> None:
        """Ask for a room's KV, or for what was missed of it while there was no connection."""
        instance = self._links[link].instance
        if room.failure is not None:
            return
        if room.instance and room.instance != instance:
            self._lose(room, f"the prefill server {room.address} has started anew")
            return
        room.link, room.instance = link, instance
        self._want(room)
        if room.told > room.kept or room.told_last:
            self._take(room)

    def _want(self, room: DecodeRoom) -> None:
        if room.link is not None:
            self._network.send(room.link, Want(*room.key, room.attempt, room.length))

    def _take(self, room: DecodeRoom) -> None:
        if room.link is not None:
            taken = Taken(*room.key, room.attempt, room.epoch, room.told, room.told_last)
            self._network.send(room.link, taken)

    def _hear(self, link: int, message: FromPrefill) -> None:
        known = self._links.get(link)
        room = None if known is None else self._by_key.get((known.address, key_of(message)))
        if room is None or room.link != link or room.attempt != message.attempt or room.failure is not None:
            self.counts["messages_ignored"] += 1
        elif isinstance(message, Ready):
            self._announced(room, message)
        elif isinstance(message, Fail) and message.code == TOO_MANY.code and self._make_way(room.principal, room):
            self._want(room)
        elif isinstance(message, Fail):
            self._lose(room, message.message, message.status, message.code)
        elif message.epoch != room.epoch:
            self.counts["messages_ignored"] += 1
        elif isinstance(message, Kept):
            room.confirmed(message.upto)
        elif isinstance(message, Gone):
            self._reader.abandon(room)
            room.end_epoch()

    def _announced(self, room: DecodeRoom, ready: Ready) -> None:
        if ready.epoch < room.epoch:
            self.counts["messages_ignored"] += 1
            return
        try:
            if not 0 <= ready.start <= ready.upto <= room.length:
                raise NotRuns(f"tokens {ready.start} to {ready.upto} of {room.length}")
            slots = Runs.unpacked(ready.runs, ready.upto - ready.start).slots()
        except NotRuns as error:
            self._lose(room, f"the prefill server {room.address} announces what cannot be: {error}")
            return
        if ready.meta is not None and not 0 <= ready.meta.token < MAX_TOKEN:
            self._lose(room, f"the prefill server {room.address} has sampled {ready.meta.token}, which is not a token")
            return
        if ready.meta is not None and ready.meta.digest != room.digest:
            text = "the prefill server has computed another prompt: both sides must tokenise alike"
            self._lose(room, text, 409, "prompt_differs")
            return
        if ready.epoch > room.epoch:
            self._reader.abandon(room)
        if not room.announced(ready, slots):
            self._want(room)

    # ---- rooms ----------------------------------------------------------------------------------------------------

    def _go_on(self, room: DecodeRoom) -> None:
        """Do what can be done now, and say how it stands where that has changed."""
        if room.failure is not None:
            if room.failure.state is GateState.OPEN and not room.handles:
                self._compute_here(room)
            return
        try:
            self._reader.begin([room])
        except (TransferError, ValueError, KeyError) as error:
            self._lose(room, f"nothing can be read from {room.address}: {error}")
            return
        self._tell_taken(room)
        if room.meta is not None and room.through:
            room.verdict = KVVerdict(GateState.OPEN, arrived=room.arrived(room.meta))
        elif room.source.shape[0] and room.shown != room.kept:
            room.shown = room.kept
            share = room.kept / room.length
            room.verdict = KVVerdict.asking(f"{room.kept} of {room.length} tokens have come", share)

    def _tell_taken(self, room: DecodeRoom) -> None:
        here = room.here
        last = room.meta is not None and here == room.length
        if room.link is None or room.memory is None or room.void or room.stale:
            return
        if here > room.told or (last and not room.told_last):
            room.told, room.told_last = here, last
            self._take(room)

    def _read_failed(self, room: DecodeRoom, reason: str) -> None:
        """Ask again what can be read: its epoch may have ended, which is told as well, by another way."""
        if room.failure is not None:
            return
        self.counts["reads_failed"] += 1
        room.retries += 1
        if room.retries > MAX_RETRIES:
            self._lose(room, f"reading from the prefill server {room.address} failed: {reason}")
            return
        room.source = room.source[: room.told]
        self._want(room)

    def _lose(self, room: DecodeRoom, reason: str, status: int = 502, code: str = "prefill_lost") -> None:
        """Its KV will not come."""
        if room.failure is not None:
            return
        self.counts["rooms_failed"] += 1
        self._drop(room, reason)
        self._reader.abandon(room)
        self._holds_less(room)
        status = status if 400 <= status <= 599 else 502
        if status >= 500 and self._options.on_loss == "compute":
            room.failure = OPEN
            room.verdict = Verdict.blocked("its reads to end, then it is computed here")
        else:
            room.failure = room.verdict = Verdict.failed(reason, status=status, code=code)

    def _compute_here(self, room: DecodeRoom) -> None:
        """Let it through with what was confirmed; the rest is computed on this server."""
        if room.verdict is None or room.verdict.state is not GateState.OPEN:
            started = 0 if room.memory is None else min(room.memory.start, room.length)
            arrived = Arrived(room.kept) if room.kept > started else None
            room.verdict = KVVerdict(GateState.OPEN, arrived=arrived)

    def _drop(self, room: DecodeRoom, reason: str) -> None:
        if room.link is not None and room.failure is None:
            self._network.send(room.link, Drop(*room.key, room.attempt, reason[:500]))

    def _make_way(self, principal: str, asking: DecodeRoom | None = None) -> bool:
        """End a room for one of another key: the youngest one, of which nothing has come, of the key that has most
        rooms. Return whether one has that has more than this one then has. With `asking`, a room of the same prefill
        server.
        """
        least = self._held[principal] + (asking is None)
        if max(self._held.values(), default=0) <= least:
            return False
        found = [
            (self._held[room.principal], room.attempt, room)
            for room in self._rooms.values()
            if self._held[room.principal] > least
            and (asking is None or room.address == asking.address)
            and room.failure is None
            and room.memory is None
            and not room.source.shape[0]
        ]
        if not found:
            return False
        self.counts["rooms_given_way"] += 1
        text = "too many requests wait for their KV, most of them with this API key: this one gave way to another's"
        self._lose(max(found)[-1], text, TOO_MANY.status, TOO_MANY.code)
        return True

    def _holds_less(self, room: DecodeRoom) -> None:
        self._held[room.principal] -= 1
        if not self._held[room.principal]:
            del self._held[room.principal]

    def _forget(self, room: DecodeRoom) -> None:
        self._rooms.pop(room.rid, None)
        if room.failure is None:
            self._holds_less(room)
        if self._by_key.get((room.address, room.key)) is room:
            del self._by_key[room.address, room.key]

    def _at(self, address: Address) -> list[DecodeRoom]:
        return [room for room in self._rooms.values() if room.address == address]
