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


def observe_prefill(items: Sequence[PrefillItem], decoding: Sequence[Req], lookback: int) -> Observed:
    """Return what is told of a prefill with decodes at its end. Behind a cached prefix `lookback` tokens are computed
    again.
    """
    rest = [0] * len(decoding)
    fresh = [item.fresh for item in items]
    again = [lookback if item.fresh and _looks_back(item) else 0 for item in items]
    slots = [item.req.kv.allocated_len for item in items] + [req.kv.allocated_len for req in decoding]
    return Observed(np.array(fresh + rest, np.bool_), np.array(again + rest, np.int64), np.array(slots, np.int64))


def observe_decode(running: RunningBatch, active: NDArray[np.int64]) -> Observed:
    """Return what is told of a batch in which the requests at these places decode."""
    slots = running.allocated[active]
    return Observed(np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.int64), slots)


def _looks_back(item: PrefillItem) -> bool:
    """Return whether there is a prefix whose last token can be computed again. One of media cannot: its encoding may be
    gone.
    """
    media, last = item.req.media, item.prefix_len - 1
    return last >= 0 and (media is None or not list(media.spans_in(last, last + 1)))
