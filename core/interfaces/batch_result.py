"""BatchResult: what a step computed, on the host. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.trees import Accepted


@dataclass(slots=True)
class BatchResult:
    """What a step computed, on the host: `tokens` int64 [sampled], their logprobs if requests want them, and in `parts`
    what device parts computed, by name.

    With tokens ahead `accepted` says what stands; `tokens` are its tokens, and `logprobs` has a row per node.
    `unsampled`: some tokens are NO_TOKEN: nothing could be drawn for their rows.
    """

    tokens: NDArray[np.int64]
    logprobs: LogprobOutput | None = None
    accepted: Accepted | None = None
    unsampled: bool = False
    parts: Mapping[str, Mapping[str, NDArray[np.generic]]] = field(default_factory=dict)
