"""The only tokens that an output may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT, PairsBuilder

NAME = "allowed_token_ids"
IDS = f"custom_params.{NAME}.ids"


class AllowedTokenIdsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may say: the tokens."""

    ids: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=4096)] = ()


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Places that stay as they are, `kept` (rows and ids, int64 [pairs] each), in `rows` int64 [m], where everything
    else may be at most `most` float32 [m, 1].
    """

    rows: torch.Tensor
    most: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor]


class AllowedTokenIds(LogitsProcessor[NoOptions]):
    """Forbids every token but those of a list, the end of the output too unless it is in the list.

    Beside a grammar, bad words or an end that may not come yet, which may leave none of them, the others come last and
    are not ruled out: they are taken only where nothing else is left.
    """

    reads_output = False

    def __init__(self, options: NoOptions, ctx: LogitsProcessorContext) -> None:
        super().__init__(options, ctx)
        self._params: list[SamplingParams] = []
        self._state: _Allowed | None = None

    def wants(self, params: SamplingParams) -> bool:
        own = read_params(params, NAME, AllowedTokenIdsParams)
        if own is None or not own.ids:
            return False
        worst = max(own.ids)
        if worst >= self.ctx.vocab_size:
            raise InvalidRequest(
                f"{IDS}: {worst} is not a token id of this model (0 to {self.ctx.vocab_size - 1})", param=IDS
            )
        return True

    def prepare(self, rows: Sequence[SamplingRow]) -> _Allowed | None:
        params = [row.params for row in rows]
        # What was gathered is kept for as long as the batch has the same requests.
        same = len(params) == len(self._params) and all(map(lambda new, old: new is old, params, self._params))
        if not same:
            self._params, self._state = params, self._gather(params)
        return self._state

    def _gather(self, params: Sequence[SamplingParams]) -> _Allowed | None:
        pairs, rows, most = PairsBuilder(), [], []
        for row, one in enumerate(params):
            own = read_params(one, NAME, AllowedTokenIdsParams)
            if own is not None and own.ids:
                rows.append(row)
                most.append(-np.inf if self._is_alone(one) else LAST_RESORT)
                pairs.add(row, np.unique(np.array(own.ids, dtype=np.int64)), 0.0)
        kept = pairs.finish(self.ctx)
        if kept is None:
            return None
        places, numbers = self.ctx.on_device(np.array(rows, np.int64), np.array(most, np.float32)[:, None])
        return _Allowed(places, numbers, (kept.rows, kept.ids))

    @staticmethod
    def _is_alone(params: SamplingParams) -> bool:
        """Return whether nothing else may forbid the tokens of the list."""
        return params.grammar is None and params.min_new_tokens == 0 and params.extra.keys() == {NAME}

    def apply(self, logits: torch.Tensor, state: _Allowed) -> None:
        kept = logits[state.kept]
        logits[state.rows] = torch.minimum(logits[state.rows], state.most)
        logits[state.kept] = kept
