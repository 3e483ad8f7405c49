"""Options of the session store."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options, SectionFields


class SessionsSection(SectionFields):
    """Conversations whose tokens the server remembers, for requests that continue them (`session_params`)."""


class SessionStoreOptions(Options):
    """Options of `in_memory`: bounds on all sessions, and on each."""

    max_sessions: int = Field(default=1024, gt=0)
    """Maximum number of open sessions. If another is opened by a key that has fewer sessions than some other key, the
    key with the most loses its longest idle session; otherwise the request gets 429."""

    max_session_tokens: int = Field(default=262_144, gt=0)
    """Maximum number of tokens of one session, of all its branches together; each takes 4 bytes."""

    idle_timeout: float = Field(default=3600.0, gt=0)
    """Seconds without a turn after which a session is closed. A request may ask for less."""
