"""The slots of states: which request reads and writes which, and what is kept of prefixes.

A step reads a request's state from one slot and writes the one behind its tokens to another, never to the same. So it
can run again after it has failed, and a request may begin from a snapshot that others read as well: nothing is copied.
A request writes to slots of its own in turn: two, or three where the step after may have run already when a step fails.
A snapshot is written by the step that passes it, to a slot that belongs to no request. Of tokens ahead of the newest
one, only some may stand: a step with such tokens writes the state behind each of them to a slot, and the next step goes
on from that behind the last one that stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.status import FinishType
from pegboard.plugins.recurrent_states.snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pegboard.core.interfaces.req import Req

_NONE_AHEAD: Mapping[str, int] = MappingProxyType({})

FRESH = 0
"""The source of a request that begins: the slot of padding."""


@dataclass(slots=True)
class Mark:
    """A place where a state is written: that behind the request's first `stop` tokens, to `slot`. `kept`: the slot is
    to become a snapshot, and belongs to the mark until then.
    """

    stop: int
    slot: int
    kept: bool = False


@dataclass(slots=True)
class Span:
    """Tokens [start, stop) of a request in one step: what is read, and where states are written on the way; the last
    mark is at its end.
    """

    start: int
    source: int
    marks: list[Mark]
    ahead: bool = False
    """Whether it has tokens ahead, of which some may not stand: each but the first ones has a mark behind it."""

    @property
    def stop(self) -> int:
        return self.marks[-1].stop

    @property
    def slots(self) -> list[int]:
        """All slots that it reads and writes."""
        return [self.source, *(mark.slot for mark in self.marks)]


@dataclass(slots=True)
class Use:
    """What a request with memory has: its slots, and the spans of its last two steps. A snapshot of its first `kept_at`
    tokens exists, and one of `branch` is wanted: so many of its tokens were found in the cache, and others share them.
    """

    own: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    kept_at: int = 0
    branch: int = 0


USE = ReqSlot(Use)


def slots_each(loop: str) -> int:
    """Return the slots of a request for `scheduler.loop`."""
    return 2 if loop == "normal" else 3


class StateSlots:
    """Slots 1 to `count`, `each` for a request. A slot is free, a request's, that of a mark, or a snapshot's.

    Snapshots are of whole pages of `page_size` tokens, and `every` tokens apart at least, but where prompts branch. A
    request has `ahead` tokens ahead of its newest one in a step at most.
    """

    def __init__(self, count: int, page_size: int, every: int, each: int, ahead: int = 7) -> None:
        self.count = count
        self.each = each
        self._page = page_size
        self._every = every
        self._ahead = ahead
        self._nearest = max(page_size, every // 4)
        """A branch is worth a snapshot so many tokens behind the one before."""
        self.free = list(range(count, 0, -1))
        self.snapshots = Snapshots()
        self.pending = 0
        """Slots of marks that will be snapshots."""
        self.resumed = 0
        """Requests that began from a snapshot."""
        self._promised = 0
        """Slots that tokens ahead may take in the step that is planned."""
        self._held = Counter[int]()
        """Slots of the spans of requests: a snapshot that one of them goes on from stays."""

    @property
    def taken(self) -> int:
        """Slots of requests."""
        return self.count - len(self.free) - len(self.snapshots) - self.pending

    def room(self, needed: AbstractSet[int]) -> int:
        """Return how many slots requests can have, snapshots in `needed` slots left as they are."""
        return len(self.free) + len(self.snapshots.slots - needed - self._held.keys()) - self._promised

    def begin_plan(self) -> None:
        """Forget what was promised for the plan before."""
        self._promised = 0

    def promise(self, reqs: Sequence[Req], most: Sequence[int], room: int) -> list[int]:
        """Return how many tokens ahead each of `reqs` may have, `most` at most. Each takes a slot of its own. Of those
        that no request needs otherwise, `room` and what tokens ahead have taken already, half is left to snapshots, and
        enough for a further request.
        """
        taken = [max(0, len(USE.of(req).own) - self.each) for req in reqs]
        total = room + sum(taken)
        each = max(0, min(self._ahead, max(0, min(total // 2, total - self.each)) // len(reqs)))
        while True:
            found = [min(count, each) for count in most]
            self._promised = sum(max(0, count - own) for count, own in zip(found, taken, strict=True))
            if not each or self._promised <= room:
                return found
            each -= 1

    def found(self, req: Req, length: int) -> Snapshot | None:
        """Return the longest snapshot within the first `length` tokens of a request, which the cache has, and note
        where it begins to differ.
        """
        snapshot = self.snapshots.longest(req, length)
        use = USE.of(req)
        use.kept_at = 0 if snapshot is None else snapshot.length
        use.branch = length if length - use.kept_at >= self._nearest else 0
        return snapshot

    def spans(
        self, reqs: Sequence[Req], starts: Sequence[int], stops: Sequence[int], ahead: Mapping[str, int] = _NONE_AHEAD
    ) -> list[Span]:
        """Return the spans of a step, the same again for one that runs once more. Of the tokens of a request that is in
        `ahead`, by its id, so many at the end are ahead of its newest one. Raises RuntimeError where a request's state
        before its `start` is not kept.
        """
        sources = [self._source(req, start, stop) for req, start, stop in zip(reqs, starts, stops, strict=True)]
        needed = {source for source in sources if isinstance(source, int)} | self._held.keys()
        # All own slots first: those are counted on, and a snapshot takes what is left.
        for req in reqs:
            self._seat(req, needed, ahead.get(req.rid, 0))
        found = []
        for req, source, start, stop in zip(reqs, sources, starts, stops, strict=True):
            if isinstance(source, int):
                source = self._span(req, source, (start, stop), needed, ahead.get(req.rid, 0))
            found.append(source)
        return found

    def computed(self, req: Req, start: int) -> None:
        """Note that a request's span from `start` on is computed: its marks are snapshots now. Of tokens ahead, one of
        those that stand becomes a snapshot where it is time for one.
        """
        use = USE.peek(req)
        span = None if use is None else next((one for one in use.spans if one.start == start), None)
        for mark in () if span is None else span.marks:
            if mark.kept:
                mark.kept = False
                self.pending -= 1
                if not self.snapshots.add(req, Snapshot(mark.slot, mark.stop)):
                    USE.of(req).own.append(mark.slot)
        if use is not None and span is not None and span.ahead:
            self._keep_what_stands(req, use, span)

    def _keep_what_stands(self, req: Req, use: Use, span: Span) -> None:
        """Make a snapshot of the last whole page of what stands of a span with tokens ahead."""
        standing = [mark for mark in span.marks if mark.stop <= req.kv.committed_len and not mark.stop % self._page]
        last = standing[-1] if standing else None
        if last is None or last.stop - use.kept_at < self._every or len(use.own) <= self.each:
            return
        use.kept_at = last.stop
        if self.snapshots.add(req, Snapshot(last.slot, last.stop)):
            use.own.remove(last.slot)

    def release(self, req: Req) -> None:
        """Take back a request's slots. Its last state stays as a snapshot where that may be of use."""
        use = USE.peek(req)
        if use is None:
            return
        done = req.kv.committed_len
        # The newest first: what an older one has behind as many tokens was of a token that did not stand.
        last = next((mark for span in reversed(use.spans) for mark in span.marks if mark.stop == done), None)
        kept = last is not None and last.slot in use.own and self._worth(req, use, done)
        if last is not None and kept and self.snapshots.add(req, Snapshot(last.slot, done)):
            use.own.remove(last.slot)
        for span in use.spans:
            self._drop(span)
        self.free += use.own
        use.own, use.spans, use.kept_at, use.branch = [], [], 0, 0

    def _worth(self, req: Req, use: Use, length: int) -> bool:
        """Return whether the state behind `length` tokens of a request that leaves is worth a snapshot. One that was
        retracted comes back for it.
        """
        if not length or length % self._page:
            return False
        reason = req.output.finish_reason
        return reason is None or (reason.type is not FinishType.ABORT and length - use.kept_at >= self._every)

    def _source(self, req: Req, start: int, stop: int) -> Span | int:
        """Return the span that a request has for these tokens already, or the slot of the state before them."""
        use = USE.of(req)
        while use.spans and use.spans[-1].start > start:
            self._drop(use.spans.pop())  # of a step that was undone
        last = use.spans[-1] if use.spans else None
        if last is not None and last.start == start:
            if last.stop == stop:
                return last
            self._drop(use.spans.pop())
            return last.source
        standing = None if last is None else next((mark for mark in last.marks if mark.stop == start), None)
        if standing is not None:
            return standing.slot
        if last is None:
            use.kept_at = start
            if not start:
                return FRESH
            if (snapshot := self.snapshots.use(req, start)) is not None:
                self.resumed += 1
                return snapshot.slot
        raise RuntimeError(f"the state of {req} behind its first {start} tokens is not kept")

    def _seat(self, req: Req, needed: AbstractSet[int], ahead: int) -> None:
        """Give a request its own slots, if it lacks some, and one for each of so many tokens ahead."""
        own = USE.of(req).own
        while len(own) < self.each + ahead:
            if (slot := self._take(needed)) is None:
                raise RuntimeError(f"no slot is left for the state of {req}")
            own.append(slot)

    def _span(self, req: Req, source: int, tokens: tuple[int, int], needed: AbstractSet[int], ahead: int) -> Span:
        """Return a new span of a request. Snapshots in `needed` slots stay."""
        use = USE.of(req)
        before = use.spans[-1].source if use.spans and self.each > 2 else source
        own = [slot for slot in use.own if slot not in (source, before)]
        if ahead:
            marks = [Mark(tokens[1] - ahead + place, own[place]) for place in range(ahead + 1)]
        else:
            marks = self._marks(req, tokens, own[0], needed)
        span = Span(tokens[0], source, marks, ahead > 0)
        self._held.update(span.slots)
        for old in use.spans[:-1]:
            self._drop(old)
        use.spans = [*use.spans[-1:], span]
        if len(use.own) > self.each + ahead:
            self._give_back(use, self.each + ahead)
        return span

    def _marks(self, req: Req, tokens: tuple[int, int], own: int, needed: AbstractSet[int]) -> list[Mark]:
        """Return the marks of tokens none of which is ahead: where snapshots are wanted, and at the end, in the slot
        `own` if no snapshot is wanted there.
        """
        use, marks = USE.of(req), []
        for place in self._places(req, use, *tokens):
            if (slot := self._take(needed)) is None:
                break  # it is never waited for
            marks.append(Mark(place, slot, kept=True))
            use.kept_at = place
            self.pending += 1
        if not marks or marks[-1].stop != tokens[1]:
            marks.append(Mark(tokens[1], own))
        return marks

    def _give_back(self, use: Use, share: int) -> None:
        """Take back what a request has beyond its share: slots of tokens ahead, and of marks for which there was a
        snapshot already.
        """
        spare = [slot for slot in use.own if slot not in self._held]
        for slot in spare[: len(use.own) - share]:
            use.own.remove(slot)
            self.free.append(slot)

    def _places(self, req: Req, use: Use, start: int, stop: int) -> list[int]:
        """Return which of a request's tokens [start, stop) snapshots are wanted behind: where others branch off, at the
        last page of its prompt that does not hold the prompt's last token, which is always computed, and at the end.
        """
        found, last = [], use.kept_at
        prompt = (req.input_len - 1) // self._page * self._page
        for place in sorted({use.branch, prompt, stop}):
            far = place == use.branch or place - last >= self._every
            if start < place <= stop and place > last and far and place % self._page == 0:
                found.append(place)
                last = place
        return found

    def _take(self, needed: AbstractSet[int]) -> int | None:
        return self.free.pop() if self.free else self.snapshots.evict_other(needed)

    def _let_go(self, span: Span) -> None:
        self._held.subtract(span.slots)
        for slot in span.slots:
            if not self._held[slot]:
                del self._held[slot]

    def _drop(self, span: Span) -> None:
        """Forget a span, and take back the slots of marks that will not be snapshots."""
        self._let_go(span)
        for mark in span.marks:
            if mark.kept:
                mark.kept = False
                self.pending -= 1
                self.free.append(mark.slot)
