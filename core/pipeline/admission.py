"""Admission: which waiting requests join the next prefill, and how much of each.

The budgets are those of SGLang's PrefillAdder: input tokens of one prefill, tokens of one chunk, and all tokens that
memory can take once the running requests have grown by what they are expected to generate.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.memory import MemoryManager


class AddResult(enum.Enum):
    """What the queue should do after a request was offered."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    """Memory is spoken for: stop until something finishes."""
    OTHER = "other"
    """This prefill is full (input or chunk budget, rows): stop for this step."""


@dataclass(slots=True)
class NewTokenRatio:
    """Which part of its allowed tokens a running request is expected to generate. Adapts as in SGLang.

    Starts at `start` x conservativeness, decays linearly over `decay_steps` decode steps to `floor` x start, and
    jumps after a retraction to what would have avoided it. `clip` bounds what any request is reckoned with.
    """

    start: float
    floor: float
    decay_steps: int
    clip: int
    current: float = 0.0

    def __post_init__(self) -> None:
        self.start = min(1.0, self.start)
        self.current = self.start

    @property
    def minimum(self) -> float:
        return self.start * self.floor

    def decay(self) -> None:
        step = (self.start - self.minimum) / self.decay_steps
        self.current = max(self.minimum, self.current - step)

    def raise_after_retraction(self, running: Sequence[Req], lookahead: int) -> None:
        """Set it so that every running request may grow `lookahead` more tokens."""
        allowed = sum(min(req.output_len + req.remaining_tokens, self.clip) for req in running)
        done = sum(req.output_len for req in running)
        self.current = max(self.current, min(1.0, (done + lookahead * len(running)) / max(1, allowed)))


@dataclass(slots=True, frozen=True)
class PrefillItem:
    """One request's share of a prefill: `extend_len` new tokens behind `prefix_len`; `partial` when its prompt goes
    on after it.
    """

    req: Req
    prefix_len: int
    extend_len: int
    partial: bool


class PrefillAdder:
    """Collects one prefill. Memory is matched, locked and allocated as requests are added, so nothing is promised
    twice.

    `running` are requests that decode, `chunk_size` bounds the tokens of this prefill when chunking is on,
    `decode_tokens` are those of decodes mixed into it. `max_new_rows` bounds how many requests may join.
    """

    def __init__(
        self,
        memory: MemoryManager,
        running: Sequence[Req],
        *,
        ratio: NewTokenRatio,
        max_prefill_tokens: int,
        chunk_size: int | None,
        decode_tokens: int,
        max_new_rows: int,
    ) -> None:
        self.items: list[PrefillItem] = []
        self._memory = memory
        self._page = memory.page_size
        self._rem_input = max_prefill_tokens - decode_tokens
        # However many decodes are mixed in, a chunk gets on by at least one page.
        self._rem_chunk = None if chunk_size is None else max(self._page, chunk_size - decode_tokens)
        self._max_new_rows = max_new_rows
        # A decode mixed in takes its page in this very step.
        self._reserved = decode_tokens * self._page
        self._clip = ratio.clip
        self._reserved += sum(int(min(r.remaining_tokens, ratio.clip) * ratio.current) for r in running)
        self._alone = not running

    @property
    def rem_total(self) -> int:
        """Tokens that memory can still take, after everybody's expected growth."""
        return self._memory.available_tokens - self._reserved

    def add_chunked(self, req: Req) -> bool:
        """Go on with a request whose prompt is partly computed. Whether it advanced."""
        left = req.seq_len - req.kv.committed_len
        take = self._chunk(left)
        if take <= 0 or not self._memory.extend(req, req.kv.committed_len + take):
            return False
        self._accept(req, req.kv.committed_len, take, take < left)
        return True

    def add(self, req: Req, *, has_chunked: bool) -> AddResult:
        """Offer a waiting request. On CONTINUE it was added, with row and slots; otherwise it is as it was before.

        `has_chunked`: another request is between two chunks, so this one must fit whole.
        """
        if len(self.items) >= self._max_new_rows:
            return AddResult.OTHER
        found = self._memory.match(req)
        left = req.seq_len - len(found)
        result = self._verdict(req, left, has_chunked)
        take = self._chunk(left)
        if result is AddResult.CONTINUE:
            self._memory.seat(req, found)
            if self._memory.extend(req, len(found) + take):
                self._accept(req, len(found), take, take < left)
                return AddResult.CONTINUE
            self._memory.release(req, keep=False)
            return AddResult.NO_TOKEN
        self._memory.unmatch(req)
        return result

    def full(self) -> bool:
        """Whether a budget of this prefill is used up."""
        return self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0)

    def _verdict(self, req: Req, left: int, has_chunked: bool) -> AddResult:
        growth = min(req.remaining_tokens, self._clip)
        need = -(-(left + growth) // self._page) * self._page
        # A request that is alone must always get in, or an estimate could lock everybody out for ever.
        nobody_else = self._alone and not self.items and not has_chunked
        if need > self.rem_total and not (nobody_else and left <= self._memory.available_tokens):
            return AddResult.NO_TOKEN
        take = self._chunk(left)
        if take <= 0 or (take < left and has_chunked):
            return AddResult.OTHER
        if self.items and take > self._rem_input:
            return AddResult.OTHER
        return AddResult.CONTINUE

    def _chunk(self, left: int) -> int:
        """How many of `left` tokens this prefill can take; a part that is not the last ends on a page boundary."""
        if self._rem_chunk is None or left <= self._rem_chunk:
            return left
        return max(0, self._rem_chunk) // self._page * self._page

    def _accept(self, req: Req, prefix_len: int, take: int, partial: bool) -> None:
        self.items.append(PrefillItem(req, prefix_len, take, partial))
        self._rem_input -= take
        if self._rem_chunk is not None:
            self._rem_chunk -= take
        later = req.seq_len - prefix_len - take
        self._reserved += later + min(req.remaining_tokens, self._clip)
