"""Words that an output must not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray

from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.toolkit.sampling.ahead import latest_output
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT, Pairs, PairsBuilder

NAME = "bad_words"


class BadWordsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may say: the words."""

    words: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=256)] = ()


@dataclass(frozen=True, slots=True)
class _Words:
    """Token sequences of one length: `heads` int64 [n, length - 1], of which each forbids its entry of `lasts` [n]."""

    heads: NDArray[np.int64]
    lasts: NDArray[np.int64]


class BadWords(LogitsProcessor[NoOptions]):
    """Forbids the last token of a word wherever the output ends with the tokens before it.

    As vLLM's `bad_words`, a word is looked for as the tokenizer writes it, at the beginning of a text and after a
    space; it may still come about from other tokens.
    """

    def __init__(self, options: NoOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        # The answers to one prompt share them: to tokenise the words of each would take seconds.
        self._tables = lru_cache(maxsize=64)(self._make_tables)

    def wants(self, params: SamplingParams) -> bool:
        own = read_params(params, NAME, BadWordsParams)
        return own is not None and bool(own.words)

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        pairs = PairsBuilder()
        for index, row in enumerate(rows):
            words = self._words_of(row)
            if words:
                output = latest_output(row, max(one.heads.shape[1] for one in words))
                forbidden = [self._forbidden(one, output) for one in words]
                number = -np.inf if row.params.grammar is None else LAST_RESORT
                pairs.add(index, np.unique(np.concatenate(forbidden)), number)
        return pairs.finish(self.ctx)

    def apply(self, logits: torch.Tensor, state: Pairs) -> None:
        logits[state.rows, state.ids] = torch.minimum(logits[state.rows, state.ids], state.numbers)

    @staticmethod
    def _forbidden(words: _Words, output: NDArray[np.int64]) -> NDArray[np.int64]:
        length = words.heads.shape[1]
        if length > len(output):
            return words.lasts[:0]
        found: NDArray[np.bool_] = (words.heads == output[len(output) - length :]).all(axis=1)
        forbidden: NDArray[np.int64] = words.lasts[found]
        return forbidden

    def _words_of(self, row: SamplingRow) -> tuple[_Words, ...]:
        """Return the token sequences of a request's words, by length; looked up once per request."""
        words: tuple[_Words, ...] | None = row.memo.get(self)
        if words is None:
            own = read_params(row.params, NAME, BadWordsParams) or BadWordsParams()
            words = row.memo[self] = self._tables(own.words)
        return words

    def _make_tables(self, words: tuple[str, ...]) -> tuple[_Words, ...]:
        sequences = {ids for word in words for ids in self._spellings(word)}
        found = []
        for length in sorted({len(ids) for ids in sequences}):
            table = np.array(sorted(ids for ids in sequences if len(ids) == length), dtype=np.int64)
            found.append(_Words(table[:, :-1], table[:, -1]))
        return tuple(found)

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences that a word is looked for as."""
        assert self.ctx.tokenizer is not None
        text = word.lstrip() or word
        plain = tuple(self.ctx.tokenizer.encode(text, add_special_tokens=False))
        spaced = tuple(self.ctx.tokenizer.encode(f" {text}", add_special_tokens=False))
        # Where the space is a token of its own, the plain spelling after it is the same word.
        other = len(spaced) == len(plain) and spaced[:1] != plain[:1]
        return [ids for ids in ((plain, spaced) if other else (plain,)) if ids]

    @classmethod
    def supports(cls, options: NoOptions, ctx: LogitsProcessorContext) -> str | None:
        return None if ctx.tokenizer is not None else "the words are texts, and there is no tokenizer"
