"""Options of the stages, at `plugins.example_stages`."""

from pegboard.core.interfaces import Options
from pydantic import Field


class StageOptions(Options):
    """What the stages are built with."""

    phrases: dict[int, tuple[int, ...]] = {}
    """Tokens that often follow a token, by its id."""
    every: int = Field(default=64, ge=1)
    """One of so many plans looks for KV to be summed up."""
