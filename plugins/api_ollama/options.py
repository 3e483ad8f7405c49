"""Options of the Ollama-compatible routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class OllamaOptions(Options):
    """Options of `apis: [{use: ollama}]`."""

    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")] = "0.13.0"
    """What `/api/version` says: some clients refuse a server that is older than they need."""
