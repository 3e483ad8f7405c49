"""The native routes: generation with token ids, state of the server, and what an operator may ask of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.administration import Administration
from pegboard.plugins.api_native.bodies import adapter_fields, answers, takes, taking
from pegboard.plugins.api_native.conversations import Conversations
from pegboard.plugins.api_native.embedding import Embedding
from pegboard.plugins.api_native.information import Information
from pegboard.plugins.api_native.load import LoadRoutes
from pegboard.plugins.api_native.media import MediaGenerateBody
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.parsing import Parsing
from pegboard.plugins.api_native.requests import GenerateBody, engine_requests, generate_body
from pegboard.plugins.api_native.responses import GeneratedAnswer, Responder
from pegboard.plugins.sessions_in_memory.api import turn
from pegboard.toolkit.http.answer_stream import AnswerStream, AnswerWriter
from pegboard.toolkit.http.answers import built_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import error_event, event, until_disconnect
from pegboard.toolkit.http.generation import Answers, are_large
from pegboard.toolkit.http.levels import LARGE, USER
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.media.service import reader_of

_EXAMPLE = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}


class NativeRouter(ApiRouter[NativeOptions]):
    """/generate with sessions, /encode, /parse_function_call, /separate_reasoning, /health, /model_info, /server_info,
    /load, and for operators /flush_cache, /abort_request, /pause_generation, /configure_logging and the profiler.
    """

    def __init__(self, options: NativeOptions, ctx: ApiContext) -> None:
        super().__init__(options, ctx)
        body = GenerateBody if reader_of(self.client) is None else MediaGenerateBody
        self._body = generate_body(taking(body, *adapter_fields(self.client.info)), ctx.body_fields)

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        return GenerateBody.own_fields() | MediaGenerateBody.own_fields()

    def routes(self) -> APIRouter:
        router = api_router(tags=["native"], dependencies=[USER])
        events = "Answers as they grow, then [DONE]."
        docs = {**takes(self._body, _EXAMPLE), **answers(GeneratedAnswer, 404, 409, 429, 504, events=events)}
        # The first route with an example is what a new server suggests to try.
        router.post("/generate", summary="Generate from text or token ids", dependencies=[LARGE], **docs)(self.generate)
        ctx = self.ctx
        information = Information(ctx, self.options.health_timeout)
        said = (information, LoadRoutes(ctx))
        for part in (Conversations(ctx), Embedding(ctx), Parsing(ctx), *said, Administration(ctx)):
            part.add_to(router)
        return router

    async def generate(self, request: Request) -> Response:
        started = time.monotonic()
        body = await parse_body(request, self._body)
        requests, batch = engine_requests(body, reader_of(self.client))
        responder = Responder(self.client.tokenizer, text_in_logprobs=body.return_text_in_logprobs)
        try:
            submit = Answers.submit(self.client, requests, turn(self.ctx, body.session_params))
            found = await until_disconnect(request, submit)
            if body.stream:
                writer = _Events(requests, found, responder, started, batch)
                return AnswerStream(found, writer, error=lambda error: error_event(body.named(error)))
            done = await until_disconnect(request, found.collect())
        except InvalidRequest as error:
            raise body.named(error) from None
        latency = time.monotonic() - started

        def write() -> list[dict[str, object]] | dict[str, object]:
            bodies = [responder.answer(one, answer, latency) for one, answer in zip(requests, done, strict=True)]
            return bodies if batch else bodies[0]

        return await built_response(write, large=are_large(done))


class _Events(AnswerWriter):
    """An event has the text and the tokens of an answer so far; logprobs and hidden states are of its new tokens only,
    so that a stream costs what its answer does.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], answers: Answers, responder: Responder, started: float, batch: bool
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._responder = responder
        self._started = started
        self._batch = batch

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        latency = time.monotonic() - self._started
        body = self._responder.event(self._requests[index], self._answers.answers[index], chunk, latency)
        return event({**body, "index": index} if self._batch else body)
