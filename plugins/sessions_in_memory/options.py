"""Options of the session store."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options, SectionFields


class SessionsSection(SectionFields):
    """Conversations whose tokens the server remembers, for requests that continue them (`session_params`)."""


class SessionStoreOptions(Options):
    """Options of `in_memory`: bounds on all sessions, and on each."""

    max_sessions: int = Field(default=1024, gt=0)
    """Most sessions that are open at once; for one more the key that has most sessions loses the one that was idle for
    longest, if the key that asks has fewer; otherwise it is refused with 429."""

    max_session_tokens: int = Field(default=262_144, gt=0)
    """Most tokens that one session keeps, of all its branches together; they take 4 bytes each."""

    idle_timeout: float = Field(default=3600.0, gt=0)
    """Seconds without a turn after which a session is closed; a request may ask for less."""
