"""For logits processors with the capability `tokens_ahead`: a row's output, tokens ahead included."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import SamplingRow


def latest_output(row: SamplingRow, count: int) -> NDArray[np.int64]:
    """Return the last `count` tokens, or fewer, of a row's output and what is ahead of it. A view of the former where
    nothing is.
    """
    ahead = row.ahead_ids[max(0, len(row.ahead_ids) - count) :]
    output = row.output_ids[max(0, len(row.output_ids) + len(ahead) - count) :]
    return np.concatenate([output, ahead]) if len(ahead) else output
