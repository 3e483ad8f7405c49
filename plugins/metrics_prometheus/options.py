"""Options of the metrics route."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class MetricsOptions(Options):
    """The level of keys that may read the metrics."""

    level: Literal["public", "user", "admin"] = "user"
    """Which key a scraper needs, where the server has keys: none, an API key, or the admin key."""
