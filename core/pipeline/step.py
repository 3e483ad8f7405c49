"""Step: one batch from its launch until its results are taken. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.step import BatchStep
from pegboard.core.pipeline.running import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import ModelWorkerBatch, PrefillItem
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.pipeline.ahead import Ahead

_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Step(BatchStep):
    """A batch of the core's, with all that commit and recovery need.

    `kvs` are the `Req.kv` of `batch.reqs` as they were at launch: a request that ended or was retracted since has
    another one. A decode alone has, of each of its requests, how many tokens are `left` behind the one that it samples,
    and its `flags`, both int64 [requests], and the running batch's `columns`; where all of the running batch decodes,
    also its `version`, NEVER otherwise. `recomputed` int64 [requests]: so many tokens at a request's front, 0 or 1, are
    computed once more behind its cached prefix, and their KV goes to the padding slot; `prefix_lens` and `extend_lens`
    count them among the new ones. None for none. `flags_any` are the flags that some of its requests have. `notes`: see
    StepView. `packed` and `closed` say what stages were told. `ahead`: tokens ahead that it computes. `loads` says
    that promised prefixes are loaded for it. `launched_at` is of the scheduler's clock.
    """

    work: ModelWorkerBatch
    kvs: list[ReqKV]
    sampled: list[Req]
    flags_any: int
    version: int = NEVER
    left: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    flags: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    columns: list[NDArray[np.generic]] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)
    packed: bool = False
    closed: bool = False
    recomputed: NDArray[np.int64] | None = None
    ahead: Ahead | None = None
    loads: bool = False
    launched_at: float = 0.0

    @property
    def reqs(self) -> list[Req]:
        return self.batch.reqs

    def ahead_of(self, index: int) -> int:
        """Return how many tokens ahead a sampled request has, by its index among them."""
        return 0 if self.ahead is None else int(self.ahead.trees.counts[index]) - 1

    @property
    def prefilled(self) -> list[Req]:
        """The requests that do not only decode: prompts, retracted ones that come back, and those that catch up."""
        return self.batch.reqs[: len(self.batch.reqs) - self.batch.decoding]


def computed_again(items: Sequence[PrefillItem], requests: int, lookback: int) -> NDArray[np.int64] | None:
    """Return `Step.recomputed` of a prefill that begins with `items`; None where no token is computed again.

    A request that has just got its row computes `lookback` tokens of its cached prefix again, unless the last of them
    is keyed: what it stands for may be gone.
    """
    if not lookback:
        return None
    recomputed = np.zeros(requests, np.int64)
    for index, item in enumerate(items):
        last = item.prefix_len - 1
        if item.fresh and last >= 0 and not item.req.tokens.is_keyed(last):
            recomputed[index] = lookback
    return recomputed
