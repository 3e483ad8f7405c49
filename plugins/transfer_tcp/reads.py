"""Reads, and the parts that connections work on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.plugins.kv_handoff.api.transfer import TransferNews, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.plugins.kv_handoff.api.transfer import Ranges


class Read:
    """A read, whose parts end one by one, in any thread."""

    def __init__(self, handle: int, peer: str, parts: int, tell: Callable[[TransferNews], None]) -> None:
        self.handle = handle
        self.peer = peer
        self._left = parts
        self._tell = tell
        self._lock = threading.Lock()
        self._reason = ""
        self._abandoned = False
        self._given_up = False

    @property
    def stopped(self) -> bool:
        """Whether its parts need not be read any more."""
        return self._abandoned or bool(self._reason)

    def abandon(self) -> None:
        """Let its parts end."""
        self._abandoned = True

    def end_part(self, reason: str = "", *, given_up: bool = False) -> None:
        """Take note that one part is written to no more: it is there, has failed for a reason, or was given up."""
        with self._lock:
            self._reason = self._reason or reason
            self._given_up |= given_up
            self._left -= 1
            if self._left:
                return
        if self._reason:
            self._tell(TransferNews(self.handle, TransferState.FAILED, self._reason))
        else:
            state = TransferState.GONE if self._given_up else TransferState.DONE
            self._tell(TransferNews(self.handle, state))


@dataclass(eq=False)
class Part:
    """A part of a read: one request. `ended` once nothing is written to its target any more."""

    read: Read
    lease: int
    source: Ranges
    target: Ranges
    nbytes: int
    ended: bool = field(default=False)

    def end(self, reason: str = "", *, given_up: bool = False) -> None:
        """End it, once."""
        if not self.ended:
            self.ended = True
            self.read.end_part(reason, given_up=given_up)
