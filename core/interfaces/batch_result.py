"""BatchResult: what a step computed, on the host. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.speculator import Accepted


@dataclass(slots=True)
class BatchResult:
    """What came out of a step, on the host: `tokens` int64 [sampled], and if a request asked for them logprobs, of
    sampled tokens and of the prompt's, partial results of the pooler float32 [spans, hidden], hidden states float32
    [rows, hidden]; see WantedRows.

    In a step with drafts `accepted` says what stands of them; `tokens` are then its tokens, and `logprobs` has a row
    per node. `unsampled` says that some tokens are NO_TOKEN: nothing could be drawn for their rows.
    """

    tokens: NDArray[np.int64]
    logprobs: LogprobOutput | None = None
    prompt_logprobs: LogprobOutput | None = None
    pooled: NDArray[np.float32] | None = None
    hidden: NDArray[np.float32] | None = None
    accepted: Accepted | None = None
    unsampled: bool = False
