"""For API plugins: the fields of bodies that say how a request is treated, and neither what is read nor how it is
sampled.
"""

from __future__ import annotations

from typing import Any

from pegboard.core.toolkit.http.bodies import RequestModel
from pegboard.core.toolkit.http.generation import salt_of


class RequestFields(RequestModel):
    """What APIs spell alike about a request. A body passes `priority`, `salt` and `params` on to the engine."""

    priority: int = 0
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same one."""
    extra_key: str = ""
    params: dict[str, Any] = {}
    """What the request says to plugins that act on requests (admission gates), by provider name."""

    @property
    def salt(self) -> str:
        """`cache_salt` of the engine's request: both of the names that the field has for it."""
        return salt_of(self.cache_salt, self.extra_key)
