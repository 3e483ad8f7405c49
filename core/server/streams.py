"""Reading the outputs of one request as they come from the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from pegboard.core.frontend.outputs import OutputState, merge
from pegboard.core.interfaces.client import OutputChunk, OutputStream, failure

if TYPE_CHECKING:
    from pegboard.core.frontend.features import Features
    from pegboard.core.interfaces.errors import InvalidRequest
    from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
    from pegboard.core.interfaces.tokenizer import Tokenizer


class RequestStream(OutputStream):
    """Outputs of one request. What its reader has not taken yet is merged, so it holds one output at most.

    `accepted` is done when the scheduler has accepted the request, or refused it. `leave` is called once, when the
    reader wants no more.
    """

    live = True

    def __init__(
        self,
        request: TokenizedRequest,
        tokenizer: Tokenizer,
        leave: Callable[[RequestStream], None],
        item_tokens: Mapping[str, int] = OutputStream.item_tokens,
        features: Features | None = None,
    ) -> None:
        self.rid = request.name or request.rid
        self.item_tokens = item_tokens
        self.wire_id = request.rid
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leave = leave
        self._state = OutputState(request, tokenizer, features)
        self._pending: TokenOutput | None = None
        self._error: InvalidRequest | None = None
        self._closed = False
        self._news = asyncio.Event()
        self._wake: Callable[[], None] = self._news.set

    def deliver(self, output: TokenOutput) -> None:
        """Keep an output for the reader. One that ends the request with an error fails it."""
        error = None if output.finish_reason is None else failure(output.finish_reason)
        if error is not None:
            self.fail(error)
            return
        self._pending = output if self._pending is None else merge(self._pending, output)
        self._wake()

    def fail(self, error: InvalidRequest) -> None:
        """End the request: its reader gets what has come, then this error."""
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._wake()

    def watch(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def take(self) -> OutputChunk | None:
        output, self._pending = self._pending, None
        if output is not None:
            if self._error is not None:
                # A reader that takes once for each wake has yet to hear of it.
                asyncio.get_running_loop().call_soon(self._wake)
            return self._state.push(output)
        if self._error is not None:
            raise self._error
        return None

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        while not self._closed:
            await self._news.wait()
            chunk = self.take()
            if chunk is None:
                self._news.clear()
                continue
            yield chunk
            if chunk.finish_reason is not None:
                return

    async def last(self) -> TokenOutput:
        """Return all outputs as one, when the request has ended; instead of iterating."""
        while self._pending is None or self._pending.finish_reason is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._pending

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._news.set()
            self._leave(self)
