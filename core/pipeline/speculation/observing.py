"""Observing: what a speculator that reads the model's states is told of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import Observed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.running import RunningBatch


def observe_prefill(items: Sequence[PrefillItem], reqs: Sequence[Req], again: NDArray[np.int64] | None) -> Observed:
    """Return what is told of a step that begins with `items`; `reqs` are all of its requests, `again` as in Step."""
    fresh = np.zeros(len(reqs), np.bool_)
    fresh[: len(items)] = [item.fresh for item in items]
    slots = np.fromiter((req.kv.allocated_len for req in reqs), np.int64, len(reqs))
    return Observed(fresh, np.zeros(len(reqs), np.int64) if again is None else again, slots)


def observe_decode(running: RunningBatch, active: NDArray[np.int64]) -> Observed:
    """Return what is told of a batch in which the requests at these places decode."""
    slots = running.allocated[active]
    return Observed(np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.int64), slots)
