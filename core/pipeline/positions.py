"""Positions: where the tokens of a batch stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req

Spans = Sequence[tuple["Req", int, int]]
"""Each request of a batch with the tokens [start, stop) that it computes."""


def positions_of(spans: Spans) -> NDArray[np.int64]:
    """Return the positions int64 [tokens] of a batch, or [axes, tokens] where it computes a prompt with TokenPositions,
    all of which have as many axes.
    """
    prompts = (req.positions for req, start, _ in spans if start < req.input_len)
    found = next((one for one in prompts if one is not None), None)
    if found is not None:
        axes = found.prompt.shape[0]
        return np.concatenate([_on_axes(axes, req, start, stop) for req, start, stop in spans], axis=1)
    return np.concatenate([np.arange(start + (by := delta_of(req)), stop + by) for req, start, stop in spans])


def delta_of(req: Req) -> int:
    """Return what the position of a request's output token is beyond its index."""
    return 0 if req.positions is None else req.positions.delta


def _on_axes(axes: int, req: Req, start: int, stop: int) -> NDArray[np.int64]:
    if req.positions is None:
        return np.broadcast_to(np.arange(start, stop), (axes, stop - start))
    return req.positions.of(start, stop)
