"""Logit bias, penalties and min_new_tokens: each gathers its (row, token) pairs on the host and touches only those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow


@dataclass(slots=True)
class Pairs:
    """Distinct places in the logits: `rows` and `ids` int64 [pairs], and a number float32 [pairs] for each."""

    rows: torch.Tensor
    ids: torch.Tensor
    numbers: torch.Tensor


class _PairsBuilder:
    """Collects the pairs of a batch, row by row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: NDArray[np.int64], numbers: NDArray[np.floating[Any]] | float) -> None:
        self._rows.append(row)
        self._ids.append(ids)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, dtype=np.float32), ids.shape))

    def finish(self, device: torch.device) -> Pairs | None:
        """All pairs on `device`; None where there are none."""
        if not any(map(len, self._ids)):
            return None
        rows = np.repeat(np.array(self._rows, dtype=np.int64), [len(ids) for ids in self._ids])
        ids, numbers = np.concatenate(self._ids), np.concatenate(self._numbers)
        return Pairs(*(torch.from_numpy(array).to(device) for array in (rows, ids, numbers)))


class LogitBias(LogitsProcessor):
    """Adds `logit_bias`. What it gathered is kept for as long as the batch has the same requests."""

    def __init__(self, options: Any, ctx: LogitsProcessorContext) -> None:
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
        pairs = _PairsBuilder()
        for row, one in enumerate(params):
            if one.logit_bias:
                count = len(one.logit_bias)
                ids = np.fromiter(one.logit_bias.keys(), np.int64, count)
                pairs.add(row, ids, np.fromiter(one.logit_bias.values(), np.float32, count))
        return pairs.finish(self.ctx.device)

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        logits[state.rows, state.ids] += state.numbers


@dataclass(slots=True)
class PenaltyState:
    """`repetition` penalties of tokens in prompt or output, and what to `subtract` for tokens in the output."""

    repetition: Pairs | None
    subtract: Pairs | None


class Penalties(LogitsProcessor):
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output.

    Repetition is transformers' formula (Keskar et al., "CTRL", 2019): a positive logit is divided by the penalty, a
    negative one multiplied. The other two are OpenAI's: logit - frequency * count - presence * (count > 0).
    """

    def __init__(self, options: Any, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._seen = np.zeros(ctx.vocab_size, dtype=np.bool_)

    def wants(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def prepare(self, rows: Sequence[SamplingRow]) -> PenaltyState | None:
        repetition, subtract = _PairsBuilder(), _PairsBuilder()
        for index, row in enumerate(rows):
            params = row.params
            if params.repetition_penalty != 1.0:
                repetition.add(index, self._distinct(row), params.repetition_penalty)
            if (params.frequency_penalty or params.presence_penalty) and len(row.output_ids):
                counts = np.bincount(row.output_ids)
                ids = np.flatnonzero(counts)
                subtract.add(index, ids, params.frequency_penalty * counts[ids] + params.presence_penalty)
        state = PenaltyState(repetition.finish(self.ctx.device), subtract.finish(self.ctx.device))
        return state if state.repetition is not None or state.subtract is not None else None

    def _distinct(self, row: SamplingRow) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output, without sorting them. Hashed media tokens have no logit."""
        self._seen[row.prompt_ids[row.prompt_ids < len(self._seen)]] = True
        self._seen[row.output_ids] = True
        ids = np.flatnonzero(self._seen)
        self._seen[ids] = False
        return ids

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        pairs = state.repetition
        if pairs is not None:
            old = logits[pairs.rows, pairs.ids]
            logits[pairs.rows, pairs.ids] = torch.where(old < 0, old * pairs.numbers, old / pairs.numbers)
        pairs = state.subtract
        if pairs is not None:
            logits[pairs.rows, pairs.ids] -= pairs.numbers


class MinNewTokens(LogitsProcessor):
    """Forbids end-of-sequence and stop tokens to rows that have generated less than `min_new_tokens`."""

    def __init__(self, options: Any, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._eos = np.array(sorted(ctx.eos_token_ids), dtype=np.int64)

    reads_output = False

    def wants(self, params: SamplingParams) -> bool:
        return params.min_new_tokens > 0

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        pairs = _PairsBuilder()
        for index, row in enumerate(rows):
            if row.generated < row.params.min_new_tokens:
                stops = np.array(row.params.stop_token_ids, dtype=np.int64)
                pairs.add(index, np.union1d(self._eos, stops), -np.inf)
        return pairs.finish(self.ctx.device)

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        logits[state.rows, state.ids] = state.numbers
