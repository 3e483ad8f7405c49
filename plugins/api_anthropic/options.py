"""Options of the Anthropic-compatible routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class AnthropicOptions(Options):
    """Options of `apis: [{use: anthropic}]`."""

    ping_interval: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without an event after which a stream gets a `ping` event, so that proxies keep the connection open."""
