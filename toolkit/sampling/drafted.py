"""For logits processors with the capability `drafts`: a row's output, drafted tokens included."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import SamplingRow


def latest_output(row: SamplingRow, count: int) -> NDArray[np.int64]:
    """Return the last `count` tokens, or fewer, of a row's output and its drafts. A view where there are no drafts."""
    drafted = row.draft_ids[max(0, len(row.draft_ids) - count) :]
    output = row.output_ids[max(0, len(row.output_ids) + len(drafted) - count) :]
    return np.concatenate([output, drafted]) if len(drafted) else output
