"""Options of the custom logits processors."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class DryOptions(Options):
    """What a request's `dry` may cost."""

    longest_range: int = Field(default=8192, ge=1)
    """How many of the latest tokens are searched for repetitions at most, whatever a request asks for."""
