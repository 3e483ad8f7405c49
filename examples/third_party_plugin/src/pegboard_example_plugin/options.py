"""What can be set in the config, below the provider's `use`."""

from pegboard.core.interfaces import Options
from pydantic import Field


class ShortestPromptOptions(Options):
    bucket: int = Field(default=1, ge=1)
    """Prompt lengths are compared in steps of this many tokens; within a step the order is that of arrival."""
