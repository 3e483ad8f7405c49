"""Options of the custom logits processors."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class DryOptions(Options):
    """What a request's `dry` may cost."""

    longest_range: int = Field(default=8192, ge=1)
    """Maximum number of latest tokens that are searched for repetitions, whatever a request asks for."""
