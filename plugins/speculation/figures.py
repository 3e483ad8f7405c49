"""Figures: what is counted of drafts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.ahead import LogPart
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.speculation.messages import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Counts:
    """Totals since the start. `verify_steps`: in which some request had drafts. `drafted_requests`: how often a request
    had drafts in a step; with each it gained a token, beside the `accepted_tokens`. `draft_time`: seconds that drafting
    took, and what is done with drafts before they are computed.
    """

    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_requests: int = 0
    draft_time: float = 0.0

    def note(self, counts: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        """Count a step that has verified trees of `counts` nodes for its requests, by which they have gained tokens."""
        had = (counts > 1) & (gained > 0)
        self.verify_steps += 1
        self.drafted_requests += int(had.sum())
        self.drafted_tokens += int(counts[had].sum() - had.sum())
        self.accepted_tokens += int(gained[had].sum() - had.sum())


class Figures(Stage):
    """Tells what was counted: nothing where the speculator never drafts."""

    name = NAME

    def __init__(self) -> None:
        self.counts = Counts()
        self._told = (0, 0, 0)

    def figures(self) -> Mapping[str, float]:
        return asdict(self.counts)


class LoggedFigures(Figures):
    """Tells it in the log, too."""

    def log_decodes(self) -> LogPart:
        counts, told = self.counts, self._told
        self._told = counts.drafted_requests, counts.drafted_tokens, counts.accepted_tokens
        requests, drafted, accepted = (now - before for now, before in zip(self._told, told, strict=True))
        length, rate = 1 + accepted / max(1, requests), accepted / max(1, drafted)
        return LogPart(
            f", accept len: {length:.2f}, accept rate: {rate:.2f}",
            {
                "drafted_tokens": drafted,
                "accepted_tokens": accepted,
                "accept_length": round(length, 3),
                "accept_rate": round(rate, 4),
            },
        )
