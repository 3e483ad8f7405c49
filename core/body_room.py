"""The room that the body of a request holds on the server, and when it may go."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar


def _no_room() -> None:
    """Outside of requests, and for small bodies."""


GIVE_BODY_ROOM: ContextVar[Callable[[], None]] = ContextVar("give_body_room", default=_no_room)
"""Gives back the room of the body that came with the request being served. The engine calls it once it has made its own
account of what the request asks for; a request whose engine does not keeps the room until its end. It is a context
variable, like the one who asks, because an API plugin that forgot to call it would hold up large bodies of others.
"""
