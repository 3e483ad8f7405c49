"""Sending messages to the scheduler: together where they come together, alone where one of them cannot be encoded."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenizedBatch, TokenizedRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.messages import ToScheduler
    from pegboard.toolkit.system.wire import ApiWire

logger = logging.getLogger(__name__)


class Outbox:
    """Messages that wait for the end of a turn of the event loop. Without a wire they are dropped.

    `unsendable` hears of each message that cannot be encoded, with the error for the client that asked for it.
    """

    def __init__(self, unsendable: Callable[[ToScheduler, InvalidRequest], None]) -> None:
        self.wire: ApiWire | None = None
        self._unsendable = unsendable
        self._messages: list[ToScheduler] = []

    def detach(self) -> None:
        """Forget the wire, and what has not left."""
        self.wire = None
        self._messages.clear()

    def send(self, message: ToScheduler) -> None:
        """Queue a message; whatever is queued in one turn of the loop leaves as one."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        wire = self.wire
        if wire is None:
            return
        try:
            wire.send(_batched(messages))
        except Exception:
            # Nothing of it has left. One of them cannot be encoded, and must not take the others with it.
            for message in messages:
                self._send_alone(wire, message)

    def _send_alone(self, wire: ApiWire, message: ToScheduler) -> None:
        try:
            wire.send([message])
        except Exception as error:
            logger.exception("a %s cannot be sent to the scheduler", type(message).__name__)
            text = f"this cannot be sent to the engine: {type(error).__name__}: {error}"
            self._unsendable(message, InvalidRequest(text, code="not_sendable", status=500))


def _batched(messages: list[ToScheduler]) -> list[ToScheduler]:
    """Neighbouring requests as one TokenizedBatch; the order stays."""
    batched: list[ToScheduler] = []
    for is_request, group in itertools.groupby(messages, key=lambda one: isinstance(one, TokenizedRequest)):
        members = list(group)
        if is_request and len(members) > 1:
            batched.append(TokenizedBatch(requests=[one for one in members if isinstance(one, TokenizedRequest)]))
        else:
            batched.extend(members)
    return batched
