"""Options of the native routes."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class NativeOptions(Options):
    """What the server answers about itself."""

    health_timeout: float = Field(20.0, gt=0)
    """Seconds that /health_generate waits for a token; after that the engine counts as unhealthy."""
