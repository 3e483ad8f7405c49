"""Options of the OpenAI-compatible routes."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class OpenAIOptions(Options):
    """What the server keeps of answers."""

    stored_responses: int = Field(1000, ge=0)
    """Maximum number of stored answers of /v1/responses, which later requests can continue. The least recently used
    answers of the API key with the most are removed first."""
    stored_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """Approximate memory limit of stored answers, in bytes."""
