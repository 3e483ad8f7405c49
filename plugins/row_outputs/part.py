"""Where batches run: rows are asked of the runner, and what it computed is reduced for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.row_outputs.messages import NAME, Rows, pooler_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.stage import StageContext


class RowPart(DevicePart):
    name = NAME
    payload = Rows

    def __init__(self, ctx: StageContext) -> None:
        self._pooler = pooler_of(ctx)

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        assert isinstance(payload, Rows)
        if payload.logprob_rows.shape[0]:
            batch.logprob_rows = put(payload.logprob_rows)
            batch.logprob_targets = put(payload.logprob_targets)
            batch.logprob_requests = tuple(one for count, one in payload.logprob_requests for _ in range(count))
        if payload.pool_rows.shape[0] or payload.hidden_rows.shape[0]:
            batch.hidden_rows = put(np.concatenate([payload.pool_rows, payload.hidden_rows]))

    def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> Mapping[str, torch.Tensor]:
        assert isinstance(payload, Rows)
        found: dict[str, torch.Tensor] = {}
        logprobs, states = output.prompt_logprobs, output.row_states
        if logprobs is not None:
            found["logprobs"] = logprobs.token_logprobs
            if logprobs.top_values is not None and logprobs.top_ids is not None:
                found["top_values"], found["top_ids"] = logprobs.top_values, logprobs.top_ids
            if logprobs.chosen:
                found["chosen"] = torch.cat([logprobs.chosen[row] for row in sorted(logprobs.chosen)])
        count = payload.pool_rows.shape[0]
        if states is not None and count:
            assert self._pooler is not None
            found["pooled"] = self._pooler.reduce(states[:count], payload.pool_spans).float()
        if states is not None and states.shape[0] > count:
            found["hidden"] = states[count:].float()
        return found
