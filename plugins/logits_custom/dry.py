"""DRY, "don't repeat yourself": a penalty that grows with the length of the repetition that a token would continue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray

from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.plugins.logits_custom.options import DryOptions
from pegboard.toolkit.sampling.ahead import latest_output
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logit_pairs import Pairs, PairsBuilder

NAME = "dry"

LONGEST_MATCH = 128
"""Longer repetitions count as this long."""

LARGEST_PENALTY = 1e30


class DryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may say, by the names that llama.cpp and text-generation-webui have for it.

    A token that would make a repetition of `allowed_length` + n tokens longer loses ``multiplier * base ** n``.
    No repetition goes across a sequence breaker. `range` is how many of the latest tokens are searched, 0 for all.
    """

    multiplier: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.8
    base: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.75
    allowed_length: Annotated[int, Meta(ge=1, le=LONGEST_MATCH)] = 2
    sequence_breakers: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...], Meta(max_length=64)] = (
        "\n",
        ":",
        '"',
        "*",
    )
    range: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class Dry(LogitsProcessor[DryOptions]):
    """Penalises the tokens that followed earlier occurrences of what the text ends with now.

    By p-e-w, text-generation-webui pull request 5677 (2024); the formula and the breakers are those of its
    implementation: a breaker is the token with which "a" followed by the breaker's text ends. Prompt and output both
    count. Repetitions are searched anew each step, with a few numpy operations per token of the longest one.
    """

    def __init__(self, options: DryOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._breaker_ids = lru_cache(maxsize=256)(self._find_breakers)

    def wants(self, params: SamplingParams) -> bool:
        own = read_params(params, NAME, DryParams)
        if own is None:
            return False
        self._breaker_ids(own.sequence_breakers)
        return own.multiplier > 0.0

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        pairs = PairsBuilder()
        for index, row in enumerate(rows):
            own = self._params_of(row)
            if own is not None:
                tokens = self._latest(row, own.range)
                ids, penalties = find_penalties(tokens, own, self._breaker_ids(own.sequence_breakers))
                known = ids < self.ctx.vocab_size
                pairs.add(index, ids[known], penalties[known])
        return pairs.finish(self.ctx)

    def apply(self, logits: torch.Tensor, state: Pairs) -> None:
        logits[state.rows, state.ids] -= state.numbers

    def _params_of(self, row: SamplingRow) -> DryParams | None:
        """Read once per request; None where it takes no part."""
        if self not in row.memo:
            row.memo[self] = read_params(row.params, NAME, DryParams) if self.wants(row.params) else None
        own: DryParams | None = row.memo[self]
        return own

    def _latest(self, row: SamplingRow, wanted: int) -> NDArray[np.int64]:
        count = min(wanted or self.options.longest_range, self.options.longest_range)
        output = latest_output(row, count)
        missing = count - len(output)
        return np.concatenate([row.prompt_ids[-missing:], output]) if missing else output

    def _find_breakers(self, texts: tuple[str, ...]) -> NDArray[np.int64]:
        assert self.ctx.tokenizer is not None
        ids = {self.ctx.tokenizer.encode(f"a{text}", add_special_tokens=False)[-1] for text in texts}
        return np.array(sorted(ids), dtype=np.int64)

    @classmethod
    def supports(cls, options: DryOptions, ctx: LogitsProcessorContext) -> str | None:
        return None if ctx.tokenizer is not None else "sequence breakers are texts, and there is no tokenizer"


def find_penalties(
    tokens: NDArray[np.int64], own: DryParams, breakers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Distinct tokens int64 [n] that would continue a repetition in `tokens` int64 [length], and what each loses."""
    nothing = np.empty(0, dtype=np.int64), np.empty(0)
    end = len(tokens) - 1
    if end < 1 or tokens[end] in breakers:
        return nothing
    places = np.flatnonzero(tokens[:end] == tokens[end])
    places = places[~np.isin(tokens[places + 1], breakers)]
    lengths = np.ones(len(places), dtype=np.int64)
    alive = np.arange(len(places))
    for back in range(1, min(end, LONGEST_MATCH - 1) + 1):
        before = tokens[end - back]
        if not len(alive) or before in breakers:
            break
        alive = alive[places[alive] >= back]
        alive = alive[tokens[places[alive] - back] == before]
        lengths[alive] += 1
    long = lengths >= own.allowed_length
    if not long.any():
        return nothing
    ids, groups = np.unique(tokens[places[long] + 1], return_inverse=True)
    longest = np.zeros(len(ids), dtype=np.int64)
    np.maximum.at(longest, groups, lengths[long])
    penalties = own.multiplier * own.base ** (longest - own.allowed_length).astype(np.float64)
    return ids, np.minimum(penalties, LARGEST_PENALTY)
