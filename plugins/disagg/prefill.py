"""The prefill side of rooms: KV is announced as it is computed, and kept until decode has it. No I/O here."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.admission_gate import GateState, Verdict
from pegboard.plugins.disagg import answers
from pegboard.plugins.disagg.answers import Answer
from pegboard.plugins.disagg.events import Lost, Network, Opened, Said, by_state
from pegboard.plugins.disagg.held import Held
from pegboard.plugins.disagg.memories import Past, Questions
from pegboard.plugins.disagg.messages import (
    MAX_RUNS,
    Drop,
    FromDecode,
    FromPrefill,
    Gone,
    Kept,
    Ready,
    RoomKey,
    Taken,
    Want,
    key_of,
)
from pegboard.plugins.disagg.prefill_room import Claim, PrefillRoom, Question
from pegboard.plugins.disagg.ranges import Runs
from pegboard.plugins.disagg.requests import Malformed, asked_by, meta_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.disagg.options import DisaggOptions
    from pegboard.plugins.kv_handoff.api.transfer import KVTransfer

LOOKS = 0.05
"""Seconds between two looks at whose time is up."""


class PrefillSide:
    """Requests are let through with one token, and after it they are held until decode has their KV, does not want it,
    or is not heard of.
    """

    def __init__(
        self,
        options: DisaggOptions,
        network: Network,
        transfer: KVTransfer,
        *,
        clock: Clock,
        rows: Callable[[Req], Mapping[str, bytes]],
        page_size: int,
        tokens: int,
    ) -> None:
        self._options, self._network, self._transfer = options, network, transfer
        self._clock, self._page_size, self._rows = clock, page_size, rows
        self._held = Held(options.max_held_share * tokens)
        self._rooms: dict[RoomKey, PrefillRoom] = {}
        self._keys: dict[str, RoomKey] = {}
        self._questions = Questions(options.max_rooms)
        self._past = Past(options.hold)
        self._instances: dict[int, bytes] = {}
        """Who is at the other end of each connection."""
        self._free: list[str] = []
        self._lease = secrets.randbits(40) << 16
        self._next_look = 0.0
        self.counts: Counter[str] = Counter()

    # ---- the gate -------------------------------------------------------------------------------------------------

    def enter(self, req: Req) -> Verdict:
        self.pump()
        try:
            key = asked_by(req).key
        except Malformed as error:
            return error.verdict()
        if key in self._rooms:
            text = f"the room {key} is in use by another request"
            return Verdict.failed(text, status=409, code="room_in_use", param="bootstrap_room")
        room = self._rooms[key] = PrefillRoom(key, req.rid, req.input_len, self._new_lease(), req.principal)
        self._keys[req.rid] = key
        self._past.forget(key)
        question = self._questions.pop(key)
        if question is not None:
            self._answer(room, question)
        if not self._held.waits and self._held.fits(room):
            return self._open(room)
        self._held.wait(room)
        return Verdict.blocked(f"{self._held.tokens} tokens of others wait to be taken by decode servers")

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        self.pump()
        asked, news = {req.rid for req in blocked}, dict[str, Verdict]()
        while (room := self._held.next(asked)) is not None and self._make_way(room):
            news[room.rid] = self._open(room)
        return news

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        self.pump()
        room = self._room(req)
        if room is None or room.failed:
            return
        known = min(int(slots.shape[0]), room.length)
        # A page that is not full yet may go into the cache as another one; the prompt's last one stays as it is.
        upto = known if known == room.length else known // self._page_size * self._page_size
        told = room.slots.shape[0]
        if upto < told or not np.array_equal(slots[:told], room.slots):
            self._new_epoch(room)
        if upto > room.slots.shape[0]:
            if not room.slots.shape[0]:
                self._transfer.allow(room.lease)
            room.slots = slots[:upto].astype(np.int32, copy=True)
            self._announce(room)

    def cancel(self, req: Req) -> None:
        self._end(req, "prefill_cancelled", "the request ended on the prefill server before it was computed")

    def finished(self, req: Req) -> bool:
        self.pump()
        room = self._room(req)
        if room is None:
            return False
        meta = meta_of(req, self._rows(req))
        if room.failed or room.unwanted or meta is None or room.slots.shape[0] < room.length:
            self._failed_there(req)
            return False
        room.meta, room.ended = meta, self._clock()
        self._announce(room)
        return True

    def released(self) -> Iterable[str]:
        self.pump()
        free, self._free = self._free, []
        return free

    def drop(self, req: Req) -> None:
        self._end(req, "prefill_dropped", "the prefill server has let the KV go")
        self._free = [rid for rid in self._free if rid != req.rid]

    # ---- the network ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what the network has to say, and end what has waited for too long."""
        for event in self._network.events():
            if isinstance(event, Opened):
                self._instances[event.link] = event.peer.instance
            elif isinstance(event, Lost):
                self._lost(event.link)
            elif isinstance(event, Said) and isinstance(event.message, FromDecode):
                self._hear(event.link, event.message)
        self._expire()

    def rooms(self) -> list[dict[str, object]]:
        """Return the rooms with their states, for operators."""
        return [
            {"room": room.key.room, "index": room.key.answer, "state": room.state.value}
            for room in self._rooms.values()
        ]

    def stats(self) -> Mapping[str, float]:
        self.pump()
        held = sum(room.ended is not None for room in self._rooms.values())
        return {
            "connections": len(self._instances),
            "rooms": len(self._rooms),
            **by_state(room.state for room in self._rooms.values()),
            "rooms_held": held,
            "rooms_wanted_before_they_came": len(self._questions),
            **{f"{name}_total": count for name, count in self.counts.items()},
        }

    def _hear(self, link: int, message: FromDecode) -> None:
        instance = self._instances.get(link)
        if instance is None:
            self.counts["messages_ignored"] += 1
        elif isinstance(message, Want):
            self._wanted(Question(instance, message.attempt, message.length, link, self._clock()), key_of(message))
        elif isinstance(message, Taken):
            self._taken_by((instance, message.attempt), message, link)
        else:
            self._dropped((instance, message.attempt), message)

    def _wanted(self, question: Question, key: RoomKey) -> None:
        room = self._rooms.get(key)
        standing = self._questions.get(key) if room is None else room.question
        if standing is not None and standing.instance == question.instance and standing.attempt > question.attempt:
            self.counts["messages_ignored"] += 1
        elif standing is not None and standing.instance != question.instance and standing.lost is None:
            self._say_no(key, question, answers.IN_USE)
        elif room is not None and room.failed:
            self._say_no(key, question, answers.NO_KV)
        elif room is not None:
            self._answer(room, question)
        elif not self._remembers(key, question) and not self._questions.put(key, question):
            self._say_no(key, question, answers.TOO_MANY)

    def _remembers(self, key: RoomKey, question: Question) -> bool:
        """Answer to a question of a room that has ended. Return False where it is of another request to come."""
        ended = self._past.get(key)
        if ended is None:
            return False
        if ended.answer is None:
            # It was taken by this very request, which has not heard of it, and will say `taken` again; or by another.
            if ended.claim != question.claim:
                self._say_no(key, question, answers.TAKEN)
            return True
        if ended.claim not in (None, question.claim):
            return False
        self._past.failed(key, question.claim, ended.answer, self._clock())
        self._say_no(key, question, ended.answer)
        return True

    def _answer(self, room: PrefillRoom, question: Question) -> None:
        """Tell everything from the start: this is its first question, or it has missed some."""
        if question.length != room.length:
            text = f"its prompt has {room.length} tokens here, and {question.length} on the decode server"
            room.question, answer = question, Answer(409, "prompt_differs", text)
            self._say_no(room.key, question, answer)
            self._give_up(room, answer)
            return
        if room.question is not None and room.question.claim == question.claim:
            question.since = room.question.since
        room.question, room.sent, room.told_all, room.unwanted = question, 0, False, False
        self._announce(room)

    def _taken_by(self, claim: Claim, message: Taken, link: int) -> None:
        key = key_of(message)
        room = self._rooms.get(key)
        if room is None or room.failed:
            self._taken_again(claim, message, link)
            return
        if room.question is None or room.question.claim != claim:
            self.counts["messages_ignored"] += 1
            return
        said = (*key, message.attempt, message.epoch)
        if message.epoch != room.epoch or message.upto > room.sent:
            self._network.send(link, Gone(*said))
            return
        self._network.send(link, Kept(*said, message.upto))
        if message.last and message.upto == room.length and room.told_all:
            self._past.taken(key, claim, room.epoch, self._clock())
            self.counts["rooms_taken"] += 1
            self._free.append(room.rid)
            self._forget(room)

    def _taken_again(self, claim: Claim, message: Taken, link: int) -> None:
        """Confirm again: what was taken before it was let go was valid, however often that is said."""
        known = self._past.get(key_of(message))
        if known is not None and known.answer is None and (known.claim, known.epoch) == (claim, message.epoch):
            said = (message.room, message.index, message.attempt, message.epoch)
            self._network.send(link, Kept(*said, message.upto))
        else:
            self.counts["messages_ignored"] += 1

    def _dropped(self, claim: Claim, message: Drop) -> None:
        key = key_of(message)
        room, question = self._rooms.get(key), self._questions.get(key)
        if question is not None and question.claim == claim:
            self._questions.pop(key)
        elif room is not None and room.question is not None and room.question.claim == claim:
            self.counts["rooms_dropped"] += 1
            if room.ended is not None:
                self._give_up(room, answers.DROPPED)
            else:
                room.question, room.unwanted = None, True
        else:
            self.counts["messages_ignored"] += 1

    def _lost(self, link: int) -> None:
        now = self._clock()
        self._instances.pop(link, None)
        standing = [room.question for room in self._rooms.values() if room.question is not None]
        for question in [*standing, *self._questions]:
            if question.link == link and question.lost is None:
                question.lost = now

    # ---- rooms ----------------------------------------------------------------------------------------------------

    def _make_way(self, room: PrefillRoom) -> bool:
        """Return whether there is room for its KV, or is now: KV that no decode server has asked for goes."""
        before = self._clock() - self._options.grace
        while not self._held.fits(room):
            found = self._held.gives_way(self._rooms.values(), room, before)
            if found is None:
                return False
            self.counts["rooms_given_way"] += 1
            self._give_up(found, answers.GAVE_WAY)
        return True

    def _open(self, room: PrefillRoom) -> Verdict:
        self._held.open(room)
        return Verdict(GateState.OPEN, max_new_tokens=1)

    def _announce(self, room: PrefillRoom) -> None:
        """Tell what has not been told, in as many messages as it takes."""
        question = room.question
        if question is None or question.lost is not None or room.failed:
            return
        upto, meta = int(room.slots.shape[0]), room.meta
        while room.sent < upto or (meta is not None and not room.told_all):
            start = room.sent
            runs = Runs.of(room.slots[start : start + MAX_RUNS])
            room.sent = min(upto, start + MAX_RUNS)
            last = meta if room.sent == upto else None
            room.told_all = last is not None
            ready = Ready(*room.key, question.attempt, room.epoch, room.lease, start, room.sent, runs.packed(), last)
            self._network.send(question.link, ready)

    def _new_epoch(self, room: PrefillRoom) -> None:
        """Take back what was announced: it is not there any more."""
        self._transfer.revoke(room.lease)
        if room.sent:
            self._tell(room, Gone(*room.key, self._attempt(room), room.epoch))
        self.counts["epochs_ended"] += 1
        room.epoch, room.lease = room.epoch + 1, self._new_lease()
        room.slots, room.sent, room.told_all = room.slots[:0].copy(), 0, False

    def _give_up(self, room: PrefillRoom, answer: Answer) -> None:
        """Its KV is not wanted, or not there. A request that still runs answers as ever, and is not held then."""
        self._transfer.revoke(room.lease)
        self._remember(room, answer)
        room.failed, room.question, room.slots = True, None, room.slots[:0].copy()
        if room.ended is not None:
            self._free.append(room.rid)
            self._forget(room)

    def _end(self, req: Req, code: str, reason: str, status: int = 502) -> None:
        room = self._room(req)
        if room is not None:
            answer = Answer(status, code, reason)
            self._tell(room, answer.of(room.key, self._attempt(room)))
            self._remember(room, answer)
            self._forget(room)

    def _remember(self, room: PrefillRoom, answer: Answer) -> None:
        if room.failed:  # and that was told then
            return
        claim = None if room.question is None else room.question.claim
        self._past.failed(room.key, claim, answer, self._clock())

    def _failed_there(self, req: Req) -> None:
        reason = req.output.finish_reason
        if reason is None or not reason.status:
            self._end(req, "prefill_failed", "the prefill server has ended the request without a token")
        else:
            self._end(req, reason.code or "prefill_failed", reason.message, reason.status)

    def _forget(self, room: PrefillRoom) -> None:
        self._transfer.revoke(room.lease)
        if self._rooms.get(room.key) is room:
            del self._rooms[room.key]
        self._keys.pop(room.rid, None)
        self._held.forget(room)

    def _expire(self) -> None:
        now, options = self._clock(), self._options
        if now < self._next_look:
            return
        self._next_look = now + LOOKS
        for key, question in self._questions.expire(now, options.grace):
            self._say_no(key, question, answers.NO_REQUEST)
        for room in list(self._rooms.values()):
            asked = room.question
            if asked is not None and asked.lost is not None and now - asked.lost >= options.grace:
                self.counts["rooms_lost"] += 1
                self._give_up(room, answers.LOST)
            elif room.ended is not None and now - max(room.ended, asked.since if asked else 0.0) >= options.hold:
                self.counts["leases_ended"] += 1
                self._tell(room, answers.LEASE_ENDED.of(room.key, self._attempt(room)))
                self._give_up(room, answers.LEASE_ENDED)
        self._past.expire(now)

    def _say_no(self, key: RoomKey, question: Question, answer: Answer) -> None:
        self.counts["rooms_refused"] += 1
        self._network.send(question.link, answer.of(key, question.attempt))

    def _tell(self, room: PrefillRoom, message: FromPrefill) -> None:
        if room.question is not None:
            self._network.send(room.question.link, message)

    def _attempt(self, room: PrefillRoom) -> int:
        return 0 if room.question is None else room.question.attempt

    def _room(self, req: Req) -> PrefillRoom | None:
        key = self._keys.get(req.rid)
        return None if key is None else self._rooms[key]

    def _new_lease(self) -> int:
        self._lease += 1
        return self._lease
