"""AsyncEngineClient: the API process's way to the scheduler process. Tokenises, sends, and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pegboard.core.frontend.features import Features
from pegboard.core.frontend.intake import Intake
from pegboard.core.frontend.outputs import finish_embedding
from pegboard.core.frontend.prompts import Asked, Packed, Prompts
from pegboard.core.frontend.stops import compiled_stops
from pegboard.core.interfaces.client import (
    AnnotatedPrompt,
    Embedding,
    EmbedRequest,
    EngineClient,
    GenerateRequest,
    ModelInfo,
    OutputStream,
)
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest, ControlReply, ControlRequest, TokenizedRequest
from pegboard.core.server.pending import Pending
from pegboard.core.server.streams import RequestStream
from pegboard.toolkit.http.asker import ASKER
from pegboard.toolkit.http.body_room import engine_has
from pegboard.toolkit.http.budget import Budget, Demand
from pegboard.toolkit.system.outbox import Outbox
from pegboard.toolkit.system.redact import redact
from pegboard.toolkit.text.encoding import Text, check_length, encode_all

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import Price
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.toolkit.http.budget import BudgetLimits
    from pegboard.toolkit.http.model_names import ModelNames
    from pegboard.toolkit.system.wire import ApiWire

logger = logging.getLogger(__name__)

R = TypeVar("R", GenerateRequest, EmbedRequest)

AT_ONCE = 64
"""Requests that are prepared between two turns of the loop."""
PING = 0
"""The call id of signs of life; no call waits for their answers."""


class AsyncEngineClient(EngineClient):
    """One engine behind a wire. The wire may be replaced: `detach` fails what is under way, `attach` begins again.
    `salts` separate the cached prefixes of those who ask, by their names; others share theirs.

    Everything runs on the loop that made it; only what long prompts and stop expressions need leaves it.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any] | None = None,
        *,
        limits: BudgetLimits | None = None,
        salts: Mapping[str, str] | None = None,
        names: ModelNames | None = None,
        features: Features | None = None,
    ) -> None:
        self._features = features or Features()
        self._names = names
        self._tokenizer = tokenizer
        self._settings = redact(settings or {})
        self.budget = Budget(limits)
        self._salts = salts or {}
        self._become(info)
        self.pending = Pending(self._abort)
        self._outbox = Outbox(self.pending.fail_unsent)
        self._reader: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[str] | None = None
        self.heard = 0
        """How often something has come over the wire."""
        self._draining = False

    # ---- life cycle -----------------------------------------------------------------------------------------------

    def attach(self, wire: ApiWire, info: ModelInfo) -> None:
        """Use this wire, at whose other end a scheduler is ready."""
        self._become(info)
        self._outbox.wire = wire
        self._broken = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(wire, self._broken), name="scheduler outputs")

    def _become(self, info: ModelInfo) -> None:
        self._info = info
        self._services = self._features.services(info)
        self._intake = Intake(info, self._tokenizer, self._features)
        self._prompts = Prompts(self._intake, self._tokenizer, self._features.expanders(info), self.budget)

    def detach(self, message: str) -> None:
        """Give the scheduler up: everything under way fails with 503 and this message. The caller closes the wire."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self._outbox.detach()
        self.pending.fail_all(_unavailable(message, "engine_failed"))

    async def drain(self, timeout: float) -> None:
        """Accept nothing more; return when all requests have ended, and gates hold none of them any more. After
        `timeout` seconds the rest is aborted.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.pending.empty.wait()
                if self._settings.get("gates"):
                    await self._let_go()
        if self.pending.streams:
            await self.abort(all_requests=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.pending.empty.wait(), 1.0)

    async def _let_go(self) -> None:
        """Wait until gates hold no finished request: another server may still read what it had."""
        while self._outbox.wire is not None and (await self._call("info")).payload.get("held_requests"):
            await asyncio.sleep(0.05)

    async def broken(self) -> str:
        """Wait until the wire that is attached has become unusable; what the scheduler did, as a predicate. Everything
        under way has failed then, as after `detach`.
        """
        assert self._broken is not None
        return await asyncio.shield(self._broken)

    def ping(self) -> None:
        """Ask the scheduler for a sign of life, which `heard` counts."""
        self._outbox.send(ControlRequest(call_id=PING, action="info"))

    async def _read(self, wire: ApiWire, broken: asyncio.Future[str]) -> None:
        try:
            while True:
                messages = await wire.receive()
                self.heard += 1
                for message in messages:
                    self.pending.receive(message)
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
        return self._info if self._names is None else self._names.added_to(self._info)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def asker(self) -> str:
        return ASKER.get()

    @property
    def services(self) -> Mapping[str, object]:
        return self._services

    def max_body_bytes(self, most: int) -> int:
        return self._features.max_body_bytes(self._info, most)

    @property
    def ready(self) -> bool:
        return self._outbox.wire is not None and not self._draining

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
        return [
            finish_embedding(request, output, self._features) for request, output in zip(requests, outputs, strict=True)
        ]

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            check_length(text, self._info.max_context_len)
        self.budget.charge_texts(texts)
        engine_has(texts)
        found = await encode_all(self._tokenizer, (Text(text, add_special_tokens) for text in texts))
        return [found[Text(text, add_special_tokens)] for text in texts]

    async def token_ids(
        self, prompt: str | list[int] | AnnotatedPrompt, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        if isinstance(prompt, AnnotatedPrompt):
            return await self._prompts.ids(prompt, self.asker, add_special_tokens=add_special_tokens)
        return await super().token_ids(prompt, add_special_tokens=add_special_tokens)

    def charge(self, size: int) -> None:
        self.budget.charge_answer(size)

    async def _submit(
        self, requests: Sequence[R], prepare: Callable[[Sequence[R], Sequence[bytes]], list[TokenizedRequest]]
    ) -> list[RequestStream]:
        """Prepare and send requests; return their streams once the scheduler has accepted all of them. `prepare` makes
        the messages, from requests and their packed prompts.
        """
        self._check_ready()
        async with self._prompts.packed(requests, self.asker) as packed:
            prepared: list[TokenizedRequest] = []
            for at in range(0, len(requests), AT_ONCE):
                if at:
                    await asyncio.sleep(0)
                prepared += prepare(requests[at : at + AT_ONCE], [one.ids for one in packed[at : at + AT_ONCE]])
            prepared = [one.complete(request) for one, request in zip(packed, prepared, strict=True)]
            prepared = self.budget.fit(requests, prepared, self._price)
            return await self._send(requests, [self._of_asker(self.asker, one) for one in prepared], packed)

    async def _send(
        self, requests: Sequence[Asked], prepared: Sequence[TokenizedRequest], packed: Sequence[Packed]
    ) -> list[RequestStream]:
        """Send what is prepared of requests; return their streams once all of them are accepted."""
        self._check_ready()
        self.pending.check_ids(prepared)
        self._intake.check_size(prepared)
        demand = Demand.of(prepared, self._price)
        self.budget.charge(demand)
        engine_has((_base(one.prompt) for one in requests), demand.settings)
        streams = [
            RequestStream(one, self._tokenizer, self.pending.leave, prompt.tokens, self._features)
            for one, prompt in zip(prepared, packed, strict=True)
        ]
        self.pending.add(streams)
        for one, prompt in zip(prepared, packed, strict=True):
            if prompt.held:
                prompt.keep()
                self.pending.when_over(one.rid, prompt.drop)
            self._outbox.send(one)
        try:
            await asyncio.gather(*(stream.accepted for stream in streams))
        except BaseException:
            for stream in streams:
                self.pending.leave(stream)
            raise
        return streams

    def _price(self, message: TokenizedRequest) -> Price:
        return self._features.price(message, self._info)

    async def abort(self, rid: str = "", *, all_requests: bool = False) -> None:
        """Abort one request, or all. The id of a batch aborts its parts, which are called ``<rid>_<number>``. Where
        several keys have a request of this id, all of them are meant.
        """
        if all_requests:
            self._outbox.send(AbortRequest(all_requests=True))
            return
        part = re.compile(re.escape(rid) + r"_\d+")
        for known, stream in self.pending.streams.items():
            if stream.rid == rid or part.fullmatch(stream.rid):
                self._abort(known)

    def _abort(self, wire_id: str) -> None:
        self._outbox.send(AbortRequest(rid=wire_id))

    async def flush_cache(self) -> bool:
        return (await self._call("flush_cache")).ok

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = await self._call(action, args)
        reply.check(action)
        return reply.payload

    async def server_info(self) -> dict[str, Any]:
        reply = await self._call("info")
        found = {"config": self._settings, "scheduler": reply.payload, "ready": self.ready}
        return {**found, **self._features.figures(self._info)}

    def _of_asker(self, asker: str, request: TokenizedRequest) -> TokenizedRequest:
        """Return the request with an id on the wire that no other key's can have, and with the key's salt."""
        if not asker:
            return request
        salt = self._salts.get(asker)
        space = request.namespace if salt is None else f"key:{salt} {request.namespace}"
        rid = f"{asker}:{request.rid}"
        return msgspec.structs.replace(request, rid=rid, name=request.rid, principal=asker, namespace=space)

    def _check_ready(self) -> None:
        if self._draining:
            raise _unavailable("the server is shutting down, try another one", "shutting_down")
        if self._outbox.wire is None:
            raise _unavailable("the engine is starting, try again in a moment", "not_ready")

    async def _call(self, action: str, args: dict[str, Any] | None = None) -> ControlReply:
        if self._outbox.wire is None:
            raise _unavailable("the engine is starting, try again in a moment", "not_ready")
        with self.pending.call() as (call_id, reply):
            self._outbox.send(ControlRequest(call_id=call_id, action=action, args=args or {}))
            return await reply


def _base(prompt: str | list[int] | AnnotatedPrompt) -> str | list[int]:
    return prompt.base if isinstance(prompt, AnnotatedPrompt) else prompt


def _unavailable(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, code=code, status=503)
