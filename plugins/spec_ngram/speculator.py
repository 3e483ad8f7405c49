"""The n-gram speculator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.plugins.spec_ngram.index import GramHash, NgramIndex
from pegboard.plugins.spec_ngram.options import NgramOptions
from pegboard.plugins.spec_ngram.shared import SharedTexts
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.toolkit.sampling.tree import chains

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.sampling import SamplingBatch

Int64s = NDArray[np.int64]

SHARED_AT_ONCE = 256
"""Tokens of a request that are shared per call at most."""


@dataclass(slots=True)
class _Notes:
    """What is kept of a request: its index, failures since the last success, how many tokens it must have to be looked
    at again, and how many of them have been shared.
    """

    index: NgramIndex
    failures: int = 0
    pause: int = 0
    shared: int = 0


class NgramSpeculator(Speculator[NgramOptions]):
    """Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): finds the longest sequence of `min_match` to `max_match`
    tokens that a request ends with and that it has had before, where it stood last, and proposes what followed.

    Where that reaches the end of the text, the draft follows itself, so that a text which repeats is drafted on.
    """

    def __init__(self, options: NgramOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.max_nodes = ctx.max_nodes
        self._grams = GramHash(options.min_match, options.max_match)
        self.shared: SharedTexts | None = None
        if options.shared:
            self.shared = SharedTexts(options.min_match, options.max_match, options.capacity)

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        drafted = [(row.tokens.item(-1), self._draft(row)) for row in rows]
        # Afterwards, so that no row's drafts depend on the other rows.
        if self.shared is not None:
            for row in rows:
                self._share(self.shared, row)
        return chains(drafted)

    def learn(self, rows: Sequence[DraftRow], offered: Int64s, gained: Int64s) -> None:
        for row, nodes, tokens in zip(rows, offered.tolist(), gained.tolist(), strict=True):
            if tokens > 1:
                self._notes(row).failures = 0
            elif nodes > 1:
                self._pause(self._notes(row), row.tokens.shape[0] - tokens)

    def accept(self, trees: TokenTrees, logits: torch.Tensor, sampling: SamplingBatch, rows: Int64s) -> Accepted:
        if self.options.accept == "match":
            return super().accept(trees, logits, sampling, rows)
        return self.options.accepted(trees, logits, sampling)

    def _draft(self, row: DraftRow) -> list[int]:
        most = min(row.most, self.max_nodes) - 1
        notes = self._notes(row)
        length = row.tokens.shape[0]
        if most < 1 or length < notes.pause:
            return []
        found = notes.index.find(row.tokens)
        if found is None:
            return []
        drafted: list[int] = []
        if found >= 0:
            drafted = row.tokens[found + 1 : found + 1 + most].tolist()
            if len(drafted) < most:
                drafted = (drafted * most)[:most]
        elif self.shared is not None:
            drafted = self.shared.follow(row.namespace, row.tokens, most)
        # Prompts may hold numbers in place of media, far beyond the vocabulary.
        size = self.ctx.spec.vocab_size
        drafted = [*takewhile(lambda token: 0 <= token < size, drafted)]
        if not drafted:
            self._pause(notes, length)
        return drafted

    def _pause(self, notes: _Notes, length: int) -> None:
        """Count a failure of the step in which the request had `length` tokens."""
        if length < notes.pause:
            return
        notes.failures += 1
        notes.pause = length + min(2**notes.failures, self.options.longest_pause)

    def _share(self, shared: SharedTexts, row: DraftRow) -> None:
        notes = self._notes(row)
        start = max(notes.shared, row.input_len)
        notes.shared = min(row.tokens.shape[0], start + SHARED_AT_ONCE)
        shared.add(row.namespace, row.tokens, start, notes.shared, row.input_len)

    def _notes(self, row: DraftRow) -> _Notes:
        notes: _Notes | None = row.memo.get(self)
        if notes is None:
            notes = row.memo[self] = _Notes(NgramIndex(self._grams))
        return notes
