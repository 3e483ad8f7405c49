"""What is kept of one request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

Counted = Literal["usage", "limit", "chunks", ""]
"""What counted the answer's tokens: the server; its length, at which it ended; nothing, and these are chunks."""

STOPPED = "stopped"
"""The error of a request that was under way when its run was stopped."""


@dataclass(slots=True)
class Record:
    """One request and its answer. Times are those of one clock, in seconds; what a server has not told is None."""

    number: int
    conversation: int = 0
    """The number of the first request of its conversation: its own, of most."""
    turn: int = 0
    input_len: int | None = None
    """How many tokens the prompt was meant to have, where that is known."""
    output_len: int = 0
    """How many tokens were asked for."""
    due: float = 0.0
    """When the arrivals wanted it to be sent."""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """When new text came."""
    counts: list[int] | None = None
    """How many tokens came each time, where the server tells."""
    end: float = 0.0
    """When the answer was complete, or as far as it has come; or when it failed."""
    over: bool = False
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted: Counted = ""
    finish_reason: str = ""
    status: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.over and not self.error

    @property
    def input_tokens(self) -> int | None:
        """The prompt's tokens as the server counted them, or as many as were asked for."""
        return self.input_len if self.prompt_tokens is None else self.prompt_tokens

    @property
    def first(self) -> float:
        """When the first text came; the end, where only that told of any token."""
        return self.times[0] if self.times else self.end

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        """Seconds until the answer was complete."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is no other, or all came at once."""
        if self.output_tokens < 2 or len(self.times) < 2:
            return None
        first = 1 if self.counts is None else self.counts[0]
        return (self.end - self.first) / max(1, self.output_tokens - first)

    def intervals(self) -> list[float]:
        """Return seconds between tokens. Tokens that came together share the time before them; where the server does
        not tell how many these were, it is the time between two arrivals of text.
        """
        times = self.times
        gaps = [after - before for before, after in itertools.pairwise(times)]
        if self.counts is None:
            return gaps
        return [gap / count for gap, count in zip(gaps, self.counts[1:], strict=True) for _ in range(count)]

    def to_dict(self, start: float) -> dict[str, Any]:
        """As JSON; times in seconds from `start`."""
        found: dict[str, Any] = {
            "number": self.number,
            "conversation": self.conversation,
            "turn": self.turn,
            "due": _from(start, self.due),
            "sent": _from(start, self.sent),
            "first": _from(start, self.first),
            "end": _from(start, self.end),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "counted": self.counted,
            "finish_reason": self.finish_reason,
            "status": self.status,
            "times": [_from(start, one) for one in self.times],
            "counts": self.counts,
        }
        if self.error:
            found["error"] = self.error
        return found


def _from(start: float, at: float) -> float:
    return round(at - start, 6)
