"""Options of the OpenAI-compatible routes."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class OpenAIOptions(Options):
    """What the server keeps of answers."""

    stored_responses: int = Field(1000, ge=0)
    """Most answers of /v1/responses to keep, for later ones to follow on; those least recently used go first, of the
    API key that has most."""
    stored_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """Most memory that they may take, in bytes, about."""
