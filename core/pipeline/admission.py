"""Admission: which waiting requests join the next prefill, and how much of each.

The budgets are those of SGLang's PrefillAdder: input tokens of one prefill, tokens of one chunk, and all tokens that
memory can take once the running requests have grown by what they are expected to generate.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch import PrefillItem
from pegboard.core.interfaces.stage import Wait
from pegboard.core.pipeline.growth import survives
from pegboard.core.pipeline.points import Points

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from pegboard.core.interfaces.prefix_cache import PrefixMatch
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.growth import NewTokenRatio
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.running import RunningBatch


class AddResult(enum.Enum):
    """What the queue should do after a request was offered."""

    CONTINUE = "continue"
    """It was added: offer the next one."""
    NO_TOKEN = "no_token"
    """Memory is spoken for: stop until something finishes."""
    SHORT = "short"
    """NO_TOKEN, for memory of a stage's own."""
    OTHER = "other"
    """This prefill is full (input or chunk budget, rows): stop for this step."""
    LATER = "later"
    """What it needs is not there yet, or a step of a stage comes first: pass it over in this step."""


class PrefillAdder:
    """Collects one prefill. Memory is matched, locked and allocated as requests are added, so nothing is promised
    twice.

    `running` are requests that decode, `chunk_size` bounds the tokens of this prefill when chunking is on,
    `decode_tokens` are those of decodes mixed into it. `max_new_rows` bounds how many requests may join, and
    `max_load_tokens` what is loaded of promised prefixes. `apart` are requests that hold memory and decode again
    soon: their growth counts as well.

    Running requests count with what they are expected to generate yet (`NewTokenRatio`). One that ignores
    end-of-sequence tokens is known to go on to its very end, so before one of those is admitted the whole course of
    memory is played through (`survives`).

    Once a stage has answered `Wait.HOLD` for a request, nothing is admitted; others are only asked.
    """

    def __init__(
        self,
        memory: MemoryManager,
        running: RunningBatch,
        *,
        ratio: NewTokenRatio,
        max_prefill_tokens: int,
        chunk_size: int | None,
        decode_tokens: int,
        max_new_rows: int,
        max_load_tokens: int,
        apart: Sequence[Req] = (),
        points: Points | None = None,
    ) -> None:
        self._points = points or Points()
        self.items: list[PrefillItem] = []
        self._held = False  # some stage has a step of its own to come first
        self._memory = memory
        self._page = memory.page_size
        # However many decodes are mixed in, one request may join them, and a chunk gets on by at least one page.
        self._rem_input = max(1, max_prefill_tokens - decode_tokens)
        self._rem_chunk = None if chunk_size is None else max(self._page, chunk_size - decode_tokens)
        self._max_new_rows = max_new_rows
        self._rem_load, self._loads = max_load_tokens, False
        self._ratio = ratio
        self._running = running
        self._apart = apart
        # A decode mixed in takes its page in this very step, and everybody who has memory is expected to grow.
        self._expected = decode_tokens * self._page + ratio.shares(running) + sum(map(ratio.share, apart))

    def add_chunked(self, req: Req) -> AddResult:
        """Offer the request whose prompt is partly computed. On CONTINUE it goes on; on LATER others may be added, and
        what it still takes counts.
        """
        done = req.kv.scheduled_len
        left = req.seq_len - done
        take, result = self._clipped(req, done, self._chunk(left), left)
        if result is AddResult.CONTINUE and not self._memory.extend(req, done + take):
            result = AddResult.NO_TOKEN
        if result is AddResult.CONTINUE:
            self._max_new_rows += 1  # it has its row already
            self._accept(req, done, take, take < left)
        elif result is AddResult.LATER:
            self.count_chunked(req)
        return result

    def count_chunked(self, req: Req) -> None:
        """Count what a request takes yet whose prompt is partly computed: the rest of it, and its output."""
        self._apart = (*self._apart, req)
        self._expected += req.seq_len - req.kv.scheduled_len + self._ratio.most(req)

    def add(self, req: Req, *, has_chunked: bool) -> AddResult:
        """Offer a waiting request. On CONTINUE it was added, with row and slots; otherwise it is as it was before.

        `has_chunked`: another request is between two chunks, so this one must fit whole.
        """
        if self.rows_full:
            return AddResult.OTHER
        if self._points.skips(req) or (self._held and not self._points.clips_for(req)):
            return AddResult.LATER
        found = self._memory.match(req)
        start = len(found) + found.promised
        left = req.seq_len - start
        result = AddResult.LATER if found.arriving else self._verdict(req, left, found.promised, has_chunked)
        take = self._chunk(left)
        if result is AddResult.CONTINUE and self._points.clips:
            take, result = self._clipped(req, start, take, left)
            if result is not AddResult.OTHER and (self._held or (take < left and has_chunked)):
                result = AddResult.LATER
        if result is AddResult.CONTINUE:
            result = self._place(req, found, start + take)
        if result is AddResult.CONTINUE:
            self._accept(req, start, take, take < left, found)
        else:
            self._memory.release(req, keep=False)
        return result

    def _place(self, req: Req, found: PrefixMatch, length: int) -> AddResult:
        """Give a request a row with `length` slots, those of its prefix among them."""
        self._memory.place(req, found)
        if not self._memory.extend(req, length):
            return AddResult.NO_TOKEN
        if not self._memory.load(req, found):
            return AddResult.LATER
        if found.promised:
            self._rem_load, self._loads = self._rem_load - found.promised, True
        return AddResult.CONTINUE

    def reserve(self, req: Req) -> bool:
        """Give a request row and slots for KV that is computed elsewhere; False where there is no room. What is
        promised of its prefix is left out: it comes as the rest does.
        """
        if not self._max_new_rows:
            return False
        found = self._memory.match(req)
        left = req.seq_len - len(found)
        alone = not (self._running or self._apart)
        fits = left <= self._memory.available_tokens if alone else self._affordable(req, left)
        if not fits:
            self._memory.unmatch(req)
            return False
        self._memory.place(req, found)
        req.kv.prefix_len = req.kv.scheduled_len = len(found)
        if not self._memory.extend(req, req.seq_len):
            self._memory.release(req, keep=False)
            return False
        return True

    @property
    def rows_full(self) -> bool:
        return len(self.items) >= self._max_new_rows

    def could_take(self, req: Req, *, has_chunked: bool) -> bool:
        """Return whether this prefill's own budgets admit the request, if memory and stages do and nothing of it is
        cached.
        """
        take = self._chunk(req.seq_len)
        if self._points.clips_for(req):
            found = self._memory.match(req)
            start = len(found) + found.promised
            self._memory.unmatch(req)
            take = self._clipped(req, start, self._chunk(req.seq_len - start), req.seq_len - start)[0]
        if take <= 0 or (take < req.seq_len and has_chunked):
            return False
        return not self.items or take <= self._rem_input

    def makes_way(self, victims: Sequence[Req], req: Req) -> int:
        """Return how many of `victims`, from the first on, have to go for `req` to fit; 0 where all are not enough."""
        share = 0
        for count, free in enumerate(self._memory.available_without(victims), start=1):
            share += self._ratio.share(victims[count - 1])
            if req.sampling.ignore_eos:
                fits = self._survives(req, req.seq_len, free, {id(one) for one in victims[:count]})
            else:
                fits = free - self._expected + share >= self._pages(req.seq_len + self._ratio.most(req))
            if fits:
                return count
        return 0

    def gave_way(self, victim: Req) -> None:
        """Note that a running request was retracted: its row is free, and its growth no longer counts."""
        self._max_new_rows += 1
        self._expected -= self._ratio.share(victim)

    def full(self) -> bool:
        """Return whether a budget of this prefill is used up."""
        return self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0)

    def _verdict(self, req: Req, left: int, loaded: int, has_chunked: bool) -> AddResult:
        """Say whether `left` tokens may be computed behind a prefix of which the last `loaded` ones are promised."""
        # A request that is alone must always get in, or an estimate could lock everybody out for ever.
        alone = not self._running and not self.items and not has_chunked
        needed = left + loaded
        if not (alone and needed <= self._memory.available_tokens) and not self._affordable(req, needed):
            return AddResult.NO_TOKEN
        if loaded > self._rem_load and self._loads:
            return AddResult.OTHER
        take = self._chunk(left)
        if take <= 0 or (take < left and has_chunked):
            return AddResult.OTHER
        if self.items and take > self._rem_input:
            return AddResult.OTHER
        return AddResult.CONTINUE

    def _chunk(self, left: int) -> int:
        """Return how many of `left` tokens this prefill can take; a part that is not the last ends on a page
        boundary.
        """
        if self._rem_chunk is None or left <= self._rem_chunk:
            return left
        return max(0, self._rem_chunk) // self._page * self._page

    def _clipped(self, req: Req, start: int, take: int, left: int) -> tuple[int, AddResult]:
        """Return how many of `take` tokens, of `left` to be computed, stages allow now: whole pages, or all that is
        left; and whether the request goes on, waits while others are asked, or ends this prefill.
        """
        found = self._points.clip(req, start, take) if self._points.clips else take
        if found is Wait.HOLD:
            self._held = True
            return 0, AddResult.OTHER if self.items else AddResult.LATER
        if found is Wait.SHORT:
            return take, AddResult.SHORT  # as many, once others have given up memory
        if isinstance(found, Wait):
            return 0, AddResult.LATER if found is Wait.SKIP else AddResult.OTHER
        if found < left:
            found = (start + found) // self._page * self._page - start
        return (found, AddResult.CONTINUE) if found > 0 else (0, AddResult.LATER)

    def _accept(self, req: Req, prefix_len: int, take: int, partial: bool, found: PrefixMatch | None = None) -> None:
        loaded_from = {} if found is None else found.promised_from
        self.items.append(PrefillItem(req, prefix_len, take, partial, found is not None, loaded_from))
        self._rem_input -= take
        if self._rem_chunk is not None:
            self._rem_chunk -= take
        req.kv.scheduled_len = prefix_len + take
        later = req.seq_len - prefix_len - take
        self._expected += later + self._ratio.most(req)

    def _affordable(self, req: Req, left: int) -> bool:
        if req.sampling.ignore_eos:
            return self._survives(req, left, self._memory.available_tokens)
        return self._pages(left + self._ratio.most(req)) <= self._memory.available_tokens - self._expected

    def _survives(self, req: Req, left: int, free: int, gone: AbstractSet[int] = frozenset()) -> bool:
        others = [*self._apart, *(item.req for item in self.items)]
        return survives(req, left, free, self._running, others, self._ratio, self._page, gone)

    def _pages(self, tokens: int) -> int:
        """Return tokens, rounded up to whole pages."""
        return -(-tokens // self._page) * self._page
