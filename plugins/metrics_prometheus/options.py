"""Options of the metrics route."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class MetricsOptions(Options):
    """The level of keys that may read the metrics."""

    level: Literal["public", "user", "admin"] = "user"
    """The key that a scraper needs, if the server has keys: none (`public`), an API key (`user`), or the admin key
    (`admin`)."""
