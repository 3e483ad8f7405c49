"""The room that a request's body takes on the server, and when it is released."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar

from pegboard.toolkit.http.value_size import NUMBER_BYTES


def _no_room(size: int) -> None:
    """Outside of requests, and for small bodies."""


GIVE_BODY_ROOM: ContextVar[Callable[[int], None]] = ContextVar("give_body_room", default=_no_room)
"""Gives back room of the body that came with the request being served, as far as so many bytes of memory explain it.
It is a context variable, like the one who asks, because an API plugin that forgot to call it would hold up the large
bodies of others.
"""


def engine_has(prompts: Iterable[str | Sequence[int]], more: int = 0) -> None:
    """Note that the engine has an account of its own of these prompts, and of `more` bytes. What the body has beyond
    that keeps its room until the request ends.
    """
    give = GIVE_BODY_ROOM.get()
    if give is not _no_room:
        several = {id(one): one for one in prompts}.values()
        give(more + sum(map(_size_of, several)))


def _size_of(prompt: str | Sequence[int]) -> int:
    return sys.getsizeof(prompt) + (0 if isinstance(prompt, str) else NUMBER_BYTES * len(prompt))
