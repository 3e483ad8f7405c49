"""The slots on the device: which adapter is in which, and which requests need it there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.req import NO_ROW, ReqSlot

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.adapters.store import Adapter


class Use:
    """What is kept of a request: its adapter; since when it waits for a slot, 0.0: it does not; and how long its output
    was when it got one.
    """

    __slots__ = ("adapter", "output_len", "waits_since")

    def __init__(self) -> None:
        self.adapter: Adapter | None = None
        self.waits_since = 0.0
        self.output_len = 0


USE = ReqSlot(Use)


class Slots:
    """Slots 1 to `count`. A request holds its adapter's slot from when a plan takes it in until its memory is taken.
    A slot without holders may get another adapter; unpinned ones, the one least recently given first.

    If a request has waited for `fair_after` seconds, the slot with the fewest holders is drained: no further request
    gets it, until the adapter that waits has it. The holders of drained slots are `overdue` in time for everyone who
    waits to get a slot within twice `fair_after`.
    """

    def __init__(self, count: int, fair_after: float) -> None:
        self._adapters: list[Adapter | None] = [None] * (count + 1)
        self._fair_after = fair_after
        self.clock: Clock = time.monotonic
        self._given = 0
        self._waiting: dict[str, Req] = {}
        self._draining: dict[int, Adapter] = {}
        """By slot, the adapter that gets it."""
        self._planned: list[Req] = []
        """Requests that hold a slot since the last plan, and may not have been taken in."""
        self._refused: set[int] = set()
        """Adapters, by number, for which this plan has no slot."""

    @property
    def in_use(self) -> int:
        return sum(one is not None and bool(one.holders) for one in self._adapters)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def uid(self, slot: int) -> int:
        """Return the number of the adapter in a slot."""
        adapter = self._adapters[slot]
        assert adapter is not None
        return adapter.uid

    def begin_plan(self) -> None:
        """Let go of what the last plan did not take in, and drain slots for those that have waited long."""
        for req in self._planned:
            if req.kv.row == NO_ROW:
                self.release(req)
        self._planned = []
        self._refused.clear()
        if self._waiting or self._draining:
            self._drain()

    def hold(self, req: Req, adapter: Adapter) -> bool:
        """Give a request its adapter's slot; False where there is none now."""
        if req.rid in adapter.holders:
            return True
        if (not adapter.slot and not self._place(adapter)) or adapter.slot in self._draining:
            self._refused.add(adapter.uid)
            self._wait(req)
            return False
        adapter.holders[req.rid] = req
        USE.of(req).output_len = req.output_len
        self._given += 1
        adapter.used = self._given
        self._planned.append(req)
        self._waiting.pop(req.rid, None)
        USE.of(req).waits_since = 0.0
        return True

    def refused(self, req: Req, adapter: Adapter) -> bool:
        """Return whether another request of this plan has found no slot for the adapter; then this one waits, too."""
        if adapter.uid not in self._refused:
            return False
        self._wait(req)
        return True

    def release(self, req: Req) -> None:
        """Take the slot back from a request that has no memory now."""
        if (use := USE.peek(req)) is not None and use.adapter is not None:
            use.adapter.holders.pop(req.rid, None)

    def forget(self, req: Req) -> None:
        """Keep nothing of a request that has ended."""
        self.release(req)
        self._waiting.pop(req.rid, None)

    def clear(self, adapter: Adapter) -> None:
        """Empty the slot of an adapter that is gone."""
        if adapter.slot:
            self._adapters[adapter.slot] = None
            adapter.slot = 0

    def _wait(self, req: Req) -> None:
        if req.rid not in self._waiting:
            self._waiting[req.rid] = req
            USE.of(req).waits_since = self.clock()

    def _place(self, adapter: Adapter) -> bool:
        """Find a slot for an adapter that has none."""
        slot = next((slot for slot, next_one in self._draining.items() if next_one is adapter), 0)
        if slot and not self._holders(slot):
            del self._draining[slot]
        else:
            slot = self._idle()
        if not slot:
            return False
        old = self._adapters[slot]
        if old is not None:
            old.slot = 0
        self._adapters[slot], adapter.slot = adapter, slot
        return True

    def _idle(self) -> int:
        """Return an empty slot, or else one that may be emptied; 0: there is none."""
        found, oldest = 0, -1
        for slot, adapter in enumerate(self._adapters[1:], start=1):
            if adapter is None:
                return slot
            idle = not (adapter.holders or adapter.pinned or slot in self._draining)
            if idle and (oldest < 0 or adapter.used < oldest):
                found, oldest = slot, adapter.used
        return found

    def _holders(self, slot: int) -> int:
        adapter = self._adapters[slot]
        return 0 if adapter is None else len(adapter.holders)

    def overdue(self) -> list[Req]:
        """Return the holders whose memory must be taken now, so that their slots are free. One that has gained no token
        since it got its slot is spared: otherwise it would begin again and again.
        """
        if not self._waiting or not self._time_is_up():
            return []
        adapters = [adapter for slot in self._draining if (adapter := self._adapters[slot]) is not None]
        holders = [req for adapter in adapters for req in adapter.holders.values()]
        return [req for req in holders if req.output_len > USE.of(req).output_len]

    def _time_is_up(self) -> bool:
        """Return whether the first of those who wait must get their slots now. There are not enough for all at once, so
        the last `fair_after` seconds that each may wait are divided among the rounds that it takes.
        """
        wanted = self._wanted()
        count = max(1, sum(adapter is None or not adapter.pinned for adapter in self._adapters[1:]))
        rounds = -(-len(wanted) // count)
        now, longest = self.clock(), 2 * self._fair_after
        return any(
            now >= since + longest - place // count * self._fair_after / rounds
            for place, (since, _) in enumerate(wanted)
        )

    def _wanted(self) -> list[tuple[float, Adapter]]:
        """Return the adapters that requests wait for, each with the time since when; the first one waits longest."""
        found: dict[int, tuple[float, Adapter]] = {}
        for req in self._waiting.values():
            use = USE.of(req)
            if use.adapter is not None:
                found.setdefault(use.adapter.uid, (use.waits_since, use.adapter))
        return list(found.values())

    def _drain(self) -> None:
        wanted = self._wanted()
        uids = {adapter.uid for _, adapter in wanted}
        self._draining = {slot: one for slot, one in self._draining.items() if one.uid in uids and not one.slot}
        late = self.clock() - self._fair_after
        for since, adapter in wanted:
            if since > late or adapter.slot or adapter in self._draining.values():
                continue
            choice = self._busy()
            if not choice:
                return
            self._draining[min(choice, key=self._holders)] = adapter

    def _busy(self) -> Sequence[int]:
        """Return the slots that may be drained."""
        return [
            slot
            for slot, adapter in enumerate(self._adapters)
            if adapter is not None and not adapter.pinned and slot not in self._draining
        ]
