"""AsyncEngineClient: the API process's way to the scheduler process. Tokenises, sends, and sorts what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pegboard.core.config.redact import redact
from pegboard.core.interfaces.client import (
    Embedding,
    EmbedRequest,
    EngineClient,
    GenerateRequest,
    ModelInfo,
    OutputChunk,
    OutputStream,
    failure,
)
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    TokenOutputs,
    ToScheduler,
)
from pegboard.core.pipeline.frontend.budget import Budget, Demand
from pegboard.core.pipeline.frontend.intake import Intake, Prompt
from pegboard.core.pipeline.frontend.outputs import OutputState, finish_embedding, merge
from pegboard.core.pipeline.frontend.stops import compiled_stops
from pegboard.core.server.asker import ASKER
from pegboard.core.server.body_room import engine_has
from pegboard.core.toolkit.system.log_lines import quoted
from pegboard.core.toolkit.text.encoding import check_length, encode_all, encode_each

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.pipeline.frontend.budget import BudgetLimits
    from pegboard.core.server.wire import ApiWire

logger = logging.getLogger(__name__)

Asked = GenerateRequest | EmbedRequest
R = TypeVar("R", GenerateRequest, EmbedRequest)

LONG_IDS = 16 * 1024
"""Token ids from which on a prompt is checked and packed in a thread, so that others' tokens keep flowing."""
AT_ONCE = 64
"""Requests that are prepared between two turns of the loop."""
PING = 0
"""The call id of signs of life; nobody waits for their answers."""


class _Stream(OutputStream):
    """Outputs of one request. What its reader has not taken yet is merged, so it holds one output at most."""

    live = True

    def __init__(self, client: AsyncEngineClient, request: TokenizedRequest, tokenizer: Tokenizer) -> None:
        self.rid = request.name or request.rid
        self.wire_id = request.rid
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._state = OutputState(request, tokenizer)
        self._pending: TokenOutput | None = None
        self._error: InvalidRequest | None = None
        self._closed = False
        self._news = asyncio.Event()
        self._wake: Callable[[], None] = self._news.set

    def deliver(self, output: TokenOutput) -> None:
        error = None if output.finish_reason is None else failure(output.finish_reason)
        if error is not None:
            self.fail(error)
            return
        self._pending = output if self._pending is None else merge(self._pending, output)
        self._wake()

    def fail(self, error: InvalidRequest) -> None:
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
                # Whoever takes once for each wake has yet to hear of it.
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
        """All outputs as one, when the request has ended; instead of iterating."""
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
            self._client.forget(self)


class AsyncEngineClient(EngineClient):
    """One engine behind a wire. The wire may be replaced: `detach` fails what is under way, `attach` begins again.

    Everything runs on the loop that made it; only what long prompts and stop expressions need leaves it.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any] | None = None,
        *,
        limits: BudgetLimits | None = None,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._settings = redact(settings or {})
        self._intake = Intake(info, tokenizer)
        self.budget = Budget(limits)
        self._wire: ApiWire | None = None
        self._reader: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[str] | None = None
        self.heard = 0
        """How often something has come over the wire."""
        self._draining = False
        self._streams: dict[str, _Stream] = {}
        self._aborted: set[str] = set()
        """Requests that nobody reads any more and whose last output has not come yet; their ids are not free."""
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._call_ids = itertools.count(1)
        self._outbox: list[ToScheduler] = []
        self._empty = asyncio.Event()
        self._empty.set()

    # ---- life cycle -----------------------------------------------------------------------------------------------

    def attach(self, wire: ApiWire, info: ModelInfo) -> None:
        """A scheduler is ready behind this wire."""
        self._info = info
        self._intake = Intake(info, self._tokenizer)
        self._wire = wire
        self._broken = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(wire, self._broken), name="scheduler outputs")

    def detach(self, message: str) -> None:
        """The scheduler is gone: everything under way fails with 503 and this message. The caller closes the wire."""
        self._wire = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self._outbox.clear()
        self._aborted.clear()
        streams, self._streams = self._streams, {}
        calls, self._calls = self._calls, {}
        error = _unavailable(message, "engine_failed")
        for stream in streams.values():
            stream.fail(error)
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
        self._empty.set()

    async def drain(self, timeout: float) -> None:
        """Accept nothing more; return when all requests have ended. After `timeout` seconds the rest is aborted."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout)
        if self._streams:
            await self.abort(all_requests=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), 1.0)

    async def broken(self) -> str:
        """Wait until the wire that is attached has become unusable; what the scheduler did, as a predicate. Everything
        under way has failed then, as after `detach`.
        """
        assert self._broken is not None
        return await asyncio.shield(self._broken)

    def ping(self) -> None:
        """Ask the scheduler for a sign of life, which `heard` counts."""
        self._send(ControlRequest(call_id=PING, action="info"))

    async def _read(self, wire: ApiWire, broken: asyncio.Future[str]) -> None:
        try:
            while True:
                messages = await wire.receive()
                self.heard += 1
                for message in messages:
                    self._dispatch(message)
        except Exception as error:
            # Outputs are missing from now on, so nothing that is under way could ever end.
            logger.exception("what the scheduler sent cannot be used")
            end = f"sent what this process cannot use ({type(error).__name__}: {error}), and was killed"
            self._reader = None
            self.detach(f"the engine failed this request: its process {end}")
            broken.set_result(end)

    # ---- what API plugins see -------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def ready(self) -> bool:
        return self._wire is not None and not self._draining

    async def submit(self, request: GenerateRequest) -> OutputStream:
        return (await self.submit_all([request]))[0]

    async def submit_all(self, requests: Sequence[GenerateRequest]) -> list[OutputStream]:
        """Sent as one message, so that the scheduler can run them in one batch."""
        async with compiled_stops(requests, self._intake, self.budget):
            return list[OutputStream](await self._submit(requests, self._intake.prepare_all))

    async def embed(self, requests: Sequence[EmbedRequest]) -> list[Embedding]:
        streams = await self._submit(requests, self._intake.prepare_embeds)
        try:
            outputs = [await stream.last() for stream in streams]
        finally:
            for stream in streams:
                await stream.aclose()
        return [finish_embedding(request, output) for request, output in zip(requests, outputs, strict=True)]

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            check_length(text, self._info.max_context_len)
        self.budget.charge_texts(texts)
        engine_has(texts)
        found = await encode_all(self._tokenizer, ((text, add_special_tokens) for text in texts))
        return [found[text, add_special_tokens] for text in texts]

    def charge(self, size: int) -> None:
        self.budget.charge_answer(size)

    async def _packed(self, requests: Sequence[Asked]) -> list[bytes]:
        """The prompt of each request as it travels; equal ones are made once. Of tokens as numbers, which take ten
        times the memory, there are one text's at a time.
        """
        for one in requests:
            self._intake.check_text(one.prompt)
        self.budget.check_texts(one.prompt for one in requests if isinstance(one.prompt, str))
        made: dict[Hashable, bytes] = {}
        texts = [(one.prompt, one.add_special_tokens) for one in requests if isinstance(one.prompt, str)]
        async for text, ids in encode_each(self._tokenizer, texts):
            made[text] = await self._pack(text[0], ids)
        found = []
        for one in requests:
            prompt = one.prompt
            key: Hashable = (prompt, one.add_special_tokens) if isinstance(prompt, str) else id(prompt)
            if key not in made:
                made[key] = await self._pack(prompt)
            found.append(made[key])
        return found

    async def _pack(self, prompt: Prompt, ids: Sequence[int] | None = None) -> bytes:
        if len(prompt if ids is None else ids) > LONG_IDS:
            return await asyncio.to_thread(self._intake.pack, prompt, ids)
        return self._intake.pack(prompt, ids)

    async def _submit(
        self, requests: Sequence[R], prepare: Callable[[Sequence[R], Sequence[bytes]], list[TokenizedRequest]]
    ) -> list[_Stream]:
        """Prepare and send requests; return their streams once the scheduler has accepted all of them. `prepare` makes
        the messages, from requests and their packed prompts.
        """
        self._check_ready()
        packed = await self._packed(requests)
        prepared: list[TokenizedRequest] = []
        for at in range(0, len(requests), AT_ONCE):
            if at:
                await asyncio.sleep(0)
            prepared += prepare(requests[at : at + AT_ONCE], packed[at : at + AT_ONCE])
        prepared = self.budget.fit(requests, prepared, self._info.hidden_size)
        prepared = [_of_asker(ASKER.get(), one) for one in prepared]
        self._check_ready()
        self._check_ids(prepared)
        self._intake.check_size(prepared)
        demand = Demand.of(prepared, self._info.hidden_size)
        self.budget.charge(demand)
        engine_has((one.prompt for one in requests), demand.settings)
        streams = [_Stream(self, one, self._tokenizer) for one in prepared]
        self._streams.update((stream.wire_id, stream) for stream in streams)
        for one in prepared:
            self._send(one)
        if streams:
            self._empty.clear()
        try:
            await asyncio.gather(*(stream.accepted for stream in streams))
        except BaseException:
            for stream in streams:
                self.forget(stream)
            raise
        return streams

    async def abort(self, rid: str = "", *, all_requests: bool = False) -> None:
        """Abort one request, or all. The id of a batch aborts its parts, which are called ``<rid>_<number>``. Where
        several keys have a request of this id, all of them are meant.
        """
        if all_requests:
            self._send(AbortRequest(all_requests=True))
            return
        part = re.compile(re.escape(rid) + r"_\d+")
        for known, stream in self._streams.items():
            if stream.rid == rid or part.fullmatch(stream.rid):
                self._send(AbortRequest(rid=known))

    async def flush_cache(self) -> bool:
        return (await self._call("flush_cache")).ok

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = await self._call(action, args)
        if not reply.ok:
            problem = reply.payload
            raise InvalidRequest(
                str(problem.get("message") or f"{action} was refused"),
                param=problem.get("param"),
                code=str(problem.get("code") or "refused"),
                status=int(problem.get("status") or 400),
            )
        return reply.payload

    async def server_info(self) -> dict[str, Any]:
        reply = await self._call("info")
        return {"config": self._settings, "scheduler": reply.payload, "ready": self.ready}

    def forget(self, stream: _Stream) -> None:
        """Abort a request that nobody reads any more. Nothing happens where it has ended; its id may be another's."""
        if self._streams.get(stream.wire_id) is stream:
            del self._streams[stream.wire_id]
            self._aborted.add(stream.wire_id)
            self._send(AbortRequest(rid=stream.wire_id))
            self._note_end()

    # ---- messages -------------------------------------------------------------------------------------------------

    def _check_ids(self, prepared: Sequence[TokenizedRequest]) -> None:
        taken: set[str] = set()
        for one in prepared:
            if one.rid in self._streams or one.rid in self._aborted or one.rid in taken:
                raise InvalidRequest(
                    f"a request with the id {one.name or one.rid!r} is still running", param="rid", code="duplicate_rid"
                )
            taken.add(one.rid)

    def _check_ready(self) -> None:
        if self._draining:
            raise _unavailable("the server is shutting down, try another one", "shutting_down")
        if self._wire is None:
            raise _unavailable("the engine is starting, try again in a moment", "not_ready")

    async def _call(self, action: str, args: dict[str, Any] | None = None) -> ControlReply:
        if self._wire is None:
            raise _unavailable("the engine is starting, try again in a moment", "not_ready")
        call_id = next(self._call_ids)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(ControlRequest(call_id=call_id, action=action, args=args or {}))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _send(self, message: ToScheduler) -> None:
        """Queue a message; whatever is queued in one turn of the loop leaves as one."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        wire = self._wire
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
            problem = InvalidRequest(
                f"this cannot be sent to the engine: {type(error).__name__}: {error}", code="not_sendable", status=500
            )
            if isinstance(message, TokenizedRequest) and (stream := self._streams.pop(message.rid, None)) is not None:
                stream.fail(problem)
                self._note_end()
            elif isinstance(message, ControlRequest):
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_exception(problem)

    def _dispatch(self, message: FromScheduler) -> None:
        if isinstance(message, TokenOutputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Accepted):
            stream = self._streams.get(message.rid)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_result(None)
        elif isinstance(message, Rejected):
            self._aborted.discard(message.rid)
            stream = self._streams.pop(message.rid, None)
            if stream is not None:
                stream.fail(
                    InvalidRequest(
                        message.message, param=message.param or None, code=message.code, status=message.status
                    )
                )
                self._note_end()
        elif isinstance(message, ControlReply):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_result(message)

    def _deliver(self, output: TokenOutput) -> None:
        finished = output.finish_reason is not None
        stream = self._streams.get(output.rid)
        if stream is None:
            if finished:
                self._aborted.discard(output.rid)
            return
        if finished:
            del self._streams[output.rid]
            self._note_end()
        try:
            stream.deliver(output)
        except Exception as error:
            # One request's outputs do not fit together; the others' are as good as ever.
            logger.exception("the output of %s cannot be delivered", quoted(stream.rid))
            stream.fail(InvalidRequest(f"internal error: {type(error).__name__}", code="internal_error", status=500))
            self.forget(stream)

    def _note_end(self) -> None:
        if not self._streams:
            self._empty.set()


def _of_asker(asker: str, request: TokenizedRequest) -> TokenizedRequest:
    """The request with an id on the wire that no other key's can have."""
    if not asker:
        return request
    return msgspec.structs.replace(request, rid=f"{asker}:{request.rid}", name=request.rid, principal=asker)


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


def _unavailable(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, code=code, status=503)
