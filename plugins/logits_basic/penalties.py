"""Frequency, presence and repetition penalties. Each step looks at new tokens only, and changes all rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow

_SPARE = 64
"""Places for new tokens that each request gets when a batch is gathered."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Distinct tokens `ids` int64 [size], and how often each stands in an output, `counts` float32 [size]."""

    ids: NDArray[np.int64]
    counts: NDArray[np.float32]

    @property
    def size(self) -> int:
        return len(self.ids)


class Tally:
    """The distinct tokens of one request, and how often each stands in its output.

    `ids` int64 [size] begin with those of the prompt, in order (none where they do not matter); `counts` float32
    [size].
    """

    def __init__(self, prompt_ids: NDArray[np.int64]) -> None:
        self._prompt = np.unique(prompt_ids)
        self.size = len(self._prompt)
        self._ids = np.empty(self.size + _SPARE, dtype=np.int64)
        self._ids[: self.size] = self._prompt
        self._counts = np.zeros(self.size + _SPARE, dtype=np.float32)
        self._places: dict[int, int] = {}
        self.known = 0
        """How many tokens of the output have been counted."""

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]

    def take(self, output_ids: NDArray[np.int64]) -> list[int]:
        """Count what is new of the output; the places whose count has changed."""
        changed = [self._place(token) for token in output_ids[self.known :].tolist()]
        for place in changed:
            self._counts[place] += 1.0
        self.known = len(output_ids)
        return changed

    def with_drafts(self, ahead_ids: Iterable[int]) -> Counts:
        """Return what is counted and drafted tokens on top. The tally itself stays as it is: they may not stand."""
        counts = self.counts.copy()
        new: dict[int, float] = {}
        for token in ahead_ids:
            place = self._find(token)
            if place is None:
                new[token] = new.get(token, 0.0) + 1.0
            else:
                counts[place] += 1.0
        if not new:
            return Counts(self.ids, counts)
        more = np.array([*new.values()], dtype=np.float32)
        return Counts(np.append(self.ids, [*new]), np.append(counts, more))

    def _place(self, token: int) -> int:
        place = self._find(token)
        if place is None:
            place = self._append(token)
        self._places[token] = place
        return place

    def _find(self, token: int) -> int | None:
        place = self._places.get(token)
        if place is None:
            place = int(np.searchsorted(self._prompt, token))
            if place == len(self._prompt) or self._prompt[place] != token:
                return None
        return place

    def _append(self, token: int) -> int:
        if self.size == len(self._ids):
            more = max(_SPARE, self.size // 2)
            self._ids = np.concatenate([self._ids, np.empty(more, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.float32)])
        self._ids[self.size] = token
        self.size += 1
        return self.size - 1


class PenaltyState:
    """The tallies of a batch's rows as one list of distinct places in the logits, on their device.

    `rows` and `ids` int64, `counts` float32: the first `size` entries. `penalties` float32 [3, batch] are each row's
    repetition, frequency and presence penalty, 1, 0, 0 for rows that take no part.
    """

    def __init__(
        self, tallies: Sequence[tuple[int, Tally | Counts]], rows: Sequence[SamplingRow], ctx: LogitsProcessorContext
    ) -> None:
        self.tallies = tuple(tallies)
        self._ctx = ctx
        sizes = [tally.size for _, tally in tallies]
        self.size = sum(sizes)
        room = self.size + _SPARE * len(sizes)
        where = np.repeat([place for place, _ in tallies], sizes)
        columns = [
            (one.repetition_penalty, one.frequency_penalty, one.presence_penalty)
            for one in (row.params for row in rows)
        ]
        self.rows, self.ids, self.counts, self.penalties = ctx.on_device(
            self._buffer([where], room, np.int64),
            self._buffer([tally.ids for _, tally in tallies], room, np.int64),
            self._buffer([tally.counts for _, tally in tallies], room, np.float32),
            np.array(columns, np.float32).T.copy(),
        )
        # Where a tally's entries are: those that it had, one after the other, and each that came since.
        self._starts = (np.cumsum(sizes) - sizes).tolist()
        self._sizes = sizes
        self._later: list[list[int]] = [[] for _ in sizes]

    def _buffer(self, parts: list[NDArray[Any]], room: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        buffer = np.zeros(room, dtype)
        buffer[: self.size] = np.concatenate(parts)
        return buffer

    def update(self, changes: Sequence[list[int]]) -> bool:
        """Write the changed places of each tally; False where there is no room, and nothing is written."""
        places: list[int] = []
        rows: list[int] = []
        ids: list[int] = []
        counts: list[float] = []
        for number, changed in enumerate(changes):
            row, tally = self.tallies[number]
            for own in changed:
                place = self._locate(number, own)
                if place >= len(self.rows):
                    return False
                places.append(place)
                rows.append(row)
                ids.append(int(tally.ids[own]))
                counts.append(float(tally.counts[own]))
        if places:
            new = np.array([places, rows, ids], np.int64)
            (where, row_ids, token_ids), numbers = self._ctx.on_device(new, np.array(counts, np.float32))
            self.rows[where] = row_ids
            self.ids[where] = token_ids
            self.counts[where] = numbers
        return True

    def _locate(self, number: int, own: int) -> int:
        """Return the entry of a tally's place, a new one for a place that is new."""
        behind = own - self._sizes[number]
        if behind < 0:
            return int(self._starts[number]) + own
        later = self._later[number]
        while len(later) <= behind:
            later.append(self.size)
            self.size += 1
        return later[behind]


class Penalties(LogitsProcessor[NoOptions]):
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output.

    Repetition is transformers' formula (Keskar et al., "CTRL", 2019): a positive logit is divided by the penalty, a
    negative one multiplied. The other two are OpenAI's: logit - frequency * count - presence * (count > 0).

    Each request keeps a tally of its tokens from step to step, and a batch that stays the same keeps what was gathered
    of them: a decode step costs its new tokens on the host, and one gather and one scatter on the device. Drafts count
    for their own step alone.
    """

    def __init__(self, options: NoOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._state: PenaltyState | None = None

    def wants(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def prepare(self, rows: Sequence[SamplingRow]) -> PenaltyState | None:
        tallies: list[tuple[int, Tally]] = []
        changes: list[list[int]] = []
        for place, row in enumerate(rows):
            tally = self._tally(row)
            if tally is not None:
                tallies.append((place, tally))
                changes.append(tally.take(row.output_ids))
        state, self._state = self._state, None
        if not tallies:
            return None
        if any(len(row.ahead_ids) for row in rows):
            return self._with_drafts(tallies, rows)
        same = state is not None and len(state.tallies) == len(tallies) and state.penalties.shape[1] == len(rows)
        if same and state is not None:
            same = all(old == new for old, new in zip(state.tallies, tallies, strict=True)) and state.update(changes)
        if not same or state is None:
            state = PenaltyState(tallies, rows, self.ctx)
        self._state = state
        return state if state.size else None

    def _with_drafts(self, tallies: Sequence[tuple[int, Tally]], rows: Sequence[SamplingRow]) -> PenaltyState | None:
        """Gather all anew: rows have other drafts in each step, and nothing of them may be kept."""
        counted = [(place, tally.with_drafts(np.asarray(rows[place].ahead_ids).tolist())) for place, tally in tallies]
        state = PenaltyState(counted, rows, self.ctx)
        return state if state.size else None

    def _tally(self, row: SamplingRow) -> Tally | None:
        """Return the request's own, None for one that takes no part."""
        tally: Tally | None
        if self in row.memo:
            tally = row.memo[self]
            if tally is None or tally.known <= len(row.output_ids):
                return tally
        tally = None
        if self.wants(row.params):
            prompt = row.prompt_ids if row.params.repetition_penalty != 1.0 else row.prompt_ids[:0]
            # Hashed media tokens have no logit.
            tally = Tally(prompt[prompt < self.ctx.vocab_size])
        row.memo[self] = tally
        return tally

    def apply(self, logits: torch.Tensor, state: PenaltyState) -> None:
        size = state.size
        rows, ids, counts = state.rows[:size], state.ids[:size], state.counts[:size]
        repetition, frequency, presence = state.penalties[:, rows]
        old = logits[rows, ids]
        new = torch.where(old < 0, old * repetition, old / repetition)
        logits[rows, ids] = new - (frequency * counts + presence * (counts > 0))
