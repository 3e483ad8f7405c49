"""The name of the API key of the current request."""

from __future__ import annotations

from contextvars import ContextVar

ASKER: ContextVar[str] = ContextVar("asker", default="")
"""The name of the key that the request brought, which tells nothing of it; "" on a server without keys. It is a context
variable and no field of requests, because an API plugin that forgot to pass it on would let clients' ids collide.
"""
