"""What clients wait for: requests that have not ended, and calls that have no reply yet."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    Accepted,
    ControlReply,
    ControlRequest,
    Rejected,
    TokenizedRequest,
    TokenOutputs,
)
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.messages import FromScheduler, TokenOutput, ToScheduler
    from pegboard.core.server.streams import RequestStream

logger = logging.getLogger(__name__)


class Pending:
    """Sorts what the scheduler says to those who wait for it. `abort` tells the scheduler to end a request.

    `streams` are the requests under way by their ids on the wire; `empty` is set while there are none.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.streams: dict[str, RequestStream] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        self._abort = abort
        self._left: set[str] = set()
        """Requests that have no reader any more and whose last output has not come yet; their ids are not free."""
        self._over: dict[str, Callable[[], None]] = {}
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._call_ids = itertools.count(1)

    def check_ids(self, prepared: Sequence[TokenizedRequest]) -> None:
        """Raise InvalidRequest for an id that is taken, or comes twice."""
        taken: set[str] = set()
        for request in prepared:
            if request.rid in self.streams or request.rid in self._left or request.rid in taken:
                raise InvalidRequest(
                    f"a request with the id {request.name or request.rid!r} is still running",
                    param="rid",
                    code="duplicate_rid",
                )
            taken.add(request.rid)

    def add(self, streams: Sequence[RequestStream]) -> None:
        """Expect outputs for these requests."""
        self.streams.update((stream.wire_id, stream) for stream in streams)
        if streams:
            self.empty.clear()

    def when_over(self, wire_id: str, call: Callable[[], None]) -> None:
        """Call this once when the scheduler has nothing more to do with a request: it has ended, or there is no
        scheduler. That is later than its stream's end where its reader left.
        """
        self._over[wire_id] = call

    def leave(self, stream: RequestStream) -> None:
        """Abort a request that has no reader any more. Nothing happens where it has ended; its id may be another's."""
        if self.streams.get(stream.wire_id) is stream:
            self._left.add(stream.wire_id)
            self._abort(stream.wire_id)
            self._end(stream.wire_id)

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[int, asyncio.Future[ControlReply]]]:
        """Expect the reply to a call, as long as the context lasts: the call's id, and a future of the reply."""
        call_id = next(self._call_ids)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            yield call_id, future
        finally:
            self._calls.pop(call_id, None)

    def receive(self, message: FromScheduler) -> None:
        """Give a message to those who wait for it."""
        if isinstance(message, TokenOutputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Accepted):
            stream = self.streams.get(message.rid)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_result(None)
        elif isinstance(message, Rejected):
            self._is_over(message.rid)
            param = message.param or None
            self._fail(
                message.rid, InvalidRequest(message.message, param=param, code=message.code, status=message.status)
            )
        elif isinstance(message, ControlReply):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_result(message)

    def fail_unsent(self, message: ToScheduler, error: InvalidRequest) -> None:
        """Fail the request or the call whose message cannot be sent."""
        if isinstance(message, TokenizedRequest):
            self._is_over(message.rid)
            self._fail(message.rid, error)
        elif isinstance(message, ControlRequest):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_exception(error)

    def fail_all(self, error: InvalidRequest) -> None:
        """Fail everything: the scheduler is gone."""
        self._left.clear()
        streams, self.streams = self.streams, {}
        calls, self._calls = self._calls, {}
        for wire_id in list(self._over):
            self._is_over(wire_id)
        for stream in streams.values():
            stream.fail(error)
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
        self.empty.set()

    def _deliver(self, output: TokenOutput) -> None:
        finished = output.finish_reason is not None
        stream = self.streams.get(output.rid)
        if finished:
            self._is_over(output.rid)
        if stream is None:
            return
        if finished:
            self._end(output.rid)
        try:
            stream.deliver(output)
        except Exception as error:
            # One request's outputs do not fit together; the others' are as good as ever.
            logger.exception("the output of %s cannot be delivered", quoted(stream.rid))
            stream.fail(InvalidRequest(f"internal error: {type(error).__name__}", code="internal_error", status=500))
            self.leave(stream)

    def _is_over(self, wire_id: str) -> None:
        self._left.discard(wire_id)
        call = self._over.pop(wire_id, None)
        if call is not None:
            call()

    def _fail(self, wire_id: str, error: InvalidRequest) -> None:
        stream = self._end(wire_id)
        if stream is not None:
            stream.fail(error)

    def _end(self, wire_id: str) -> RequestStream | None:
        """Take a request out; return its stream, or None where it is not here."""
        stream = self.streams.pop(wire_id, None)
        if not self.streams:
            self.empty.set()
        return stream
