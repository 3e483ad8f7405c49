"""No repetitions, for requests that ask for it: `"custom_params": {"no_repeat": {"size": 3}}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch
from pegboard.core.interfaces import InvalidRequest, LogitsProcessor
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT, PairsBuilder

from pegboard_example_plugin.options import NoRepeatOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pegboard.core.interfaces import SamplingParams, SamplingRow
    from pegboard.toolkit.sampling.logit_pairs import Pairs

NAME = "no_repeat"


class NoRepeatParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says. `size` has no default, so it must be given."""

    size: Annotated[int, msgspec.Meta(ge=1)]


class NoRepeat(LogitsProcessor[NoRepeatOptions]):
    """What followed an earlier occurrence of the output's last ``size - 1`` tokens does not come next."""

    def wants(self, params: SamplingParams) -> bool:
        own = read_params(params, NAME, NoRepeatParams)
        if own is not None and own.size > self.options.longest:
            field = f"custom_params.{NAME}.size"
            raise InvalidRequest(f"{field} must be at most {self.options.longest}, got {own.size}", param=field)
        return own is not None

    def prepare(self, rows: Sequence[SamplingRow]) -> Pairs | None:
        pairs = PairsBuilder()
        for index, row in enumerate(rows):
            own = read_params(row.params, NAME, NoRepeatParams)
            if own is not None:
                # Where everything else is ruled out too, by a grammar say, a repetition is better than a failure.
                # A speculator's drafts are output as well: this row counts only where the model agrees with them.
                output = np.concatenate([row.output_ids, np.array(row.ahead_ids, dtype=np.int64)])
                pairs.add(index, continuations(output, own.size), LAST_RESORT)
        return pairs.finish(self.ctx)

    def apply(self, logits: torch.Tensor, state: Pairs) -> None:
        places = state.rows, state.ids
        logits[places] = torch.minimum(logits[places], state.numbers)


def continuations(output: NDArray[np.int64], size: int) -> NDArray[Any]:
    """Distinct tokens int64 [n] with which a sequence of `size` tokens of the output would come a second time."""
    if len(output) < size:
        return output[:0]
    windows = np.lib.stride_tricks.sliding_window_view(output, size)
    last = output[len(output) - size + 1 :]
    return np.unique(windows[(windows[:, :-1] == last).all(axis=1), -1])
