"""Logit bias and min_new_tokens: each gathers its (row, token) pairs on the host and touches only those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT, Pairs, PairsBuilder


class LogitBias(LogitsProcessor[NoOptions]):
    """Adds `logit_bias`. What it gathered is kept for as long as the batch has the same requests."""

    def __init__(self, options: NoOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._params: list[SamplingParams] = []
        self._state: Pairs | None = None

    reads_output = False

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        params = [row.params for row in rows]
        same = len(params) == len(self._params) and all(map(lambda new, old: new is old, params, self._params))
        if not same:
            self._params, self._state = params, self._gather(params)
        return self._state

    def _gather(self, params: Sequence[SamplingParams]) -> Pairs | None:
        pairs = PairsBuilder()
        for row, one in enumerate(params):
            if one.logit_bias:
                count = len(one.logit_bias)
                ids = np.fromiter(one.logit_bias.keys(), np.int64, count)
                pairs.add(row, ids, np.fromiter(one.logit_bias.values(), np.float32, count))
        return pairs.finish(self.ctx)

    def apply(self, logits: torch.Tensor, state: Pairs) -> None:
        logits[state.rows, state.ids] += state.numbers


class MinNewTokens(LogitsProcessor[NoOptions]):
    """Forbids end-of-sequence and stop tokens to rows that have generated less than `min_new_tokens`.

    A grammar that is at its end allows nothing but the end: with one, these tokens come last and are not ruled out.
    """

    def __init__(self, options: NoOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._eos = np.array(sorted(ctx.eos_token_ids), dtype=np.int64)

    reads_output = False

    def wants(self, params: SamplingParams) -> bool:
        if params.min_new_tokens > 0 and len(self._ends(params)) >= self.ctx.vocab_size:
            raise InvalidRequest(
                f"min_new_tokens {params.min_new_tokens} cannot be reached: every token of this model is in "
                "stop_token_ids or ends the output",
                param="min_new_tokens",
            )
        return params.min_new_tokens > 0

    def _ends(self, params: SamplingParams) -> NDArray[np.int64]:
        return np.union1d(self._eos, np.array(params.stop_token_ids, dtype=np.int64))

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        pairs = PairsBuilder()
        for index, row in enumerate(rows):
            if row.generated < row.params.min_new_tokens:
                pairs.add(index, self._ends(row.params), -np.inf if row.params.grammar is None else LAST_RESORT)
        return pairs.finish(self.ctx)

    def apply(self, logits: torch.Tensor, state: Pairs) -> None:
        logits[state.rows, state.ids] = state.numbers
