"""The Ollama-compatible routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_ollama.answers import (
    ERRORS,
    AnswerWriter,
    ChatAnswer,
    EmbedAnswer,
    EmbeddingAnswer,
    GenerateAnswer,
    Part,
    loaded,
    reason_of,
)
from pegboard.plugins.api_ollama.bodies import (
    NAMES,
    ChatBody,
    EmbedBody,
    EmbeddingBody,
    GenerateBody,
    GeneratingBody,
)
from pegboard.plugins.api_ollama.messages import chat_tools, template_messages, user_message
from pegboard.plugins.api_ollama.models import Models, checked_name
from pegboard.plugins.api_ollama.options import OllamaOptions
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.turn import Turn, take_turn
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.levels import LARGE, USER
from pegboard.toolkit.http.line_stream import LineStream, line, line_answer
from pegboard.toolkit.http.openapi import body_docs, json_answer
from pegboard.toolkit.http.request_fields import with_declared
from pegboard.toolkit.http.routing import api_router

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Embedding, GenerateRequest

Documented = dict[Any, Any]
"""What FastAPI is told of a route."""
MAX_INPUTS = 2048
"""Most texts of a request for embeddings."""


def error_data(error: InvalidRequest) -> dict[str, str]:
    """Return an error as Ollama has it: one sentence, which names the field."""
    named = not error.param or error.param in error.message
    return {"error": error.message if named else f"{error.param}: {error.message}"}


class OllamaRouter(ApiRouter[OllamaOptions]):
    """/api/chat and /api/generate, in lines and whole, /api/embed, and what there is to know of models."""

    def __init__(self, options: OllamaOptions, ctx: ApiContext) -> None:
        super().__init__(options, ctx)
        self._chat_body = with_declared(ChatBody, ctx.body_fields)
        self._generate_body = with_declared(GenerateBody, ctx.body_fields)

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        return frozenset(ChatBody.model_fields.keys() | GenerateBody.model_fields.keys())

    def routes(self) -> APIRouter:
        router = api_router(
            errors=lambda error: json_response(error_data(error), error.status), tags=["ollama"], dependencies=[USER]
        )
        model = self.client.info.served_name
        said: dict[str, object] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        few = {"model": model, "options": {"num_predict": 32, "temperature": 0}}
        lines = "A line for each piece, and a last one with the end."

        chat = _docs(self._chat_body, {**few, **said}, line_answer(ChatAnswer, lines=lines))
        router.post("/api/chat", summary="Answer a conversation", **chat)(self.chat)
        generate = _docs(
            self._generate_body, {**few, "prompt": "Once upon a time"}, line_answer(GenerateAnswer, lines=lines)
        )
        router.post("/api/generate", summary="Answer a prompt", **generate)(self.generate)
        embed = _docs(EmbedBody, {"model": model, "input": ["Cats purr."]}, json_answer(EmbedAnswer))
        router.post("/api/embed", summary="Texts as vectors", **embed)(self.embed)
        embedding = _docs(EmbeddingBody, {"model": model, "prompt": "Cats purr."}, json_answer(EmbeddingAnswer))
        router.post("/api/embeddings", summary="A text as a vector", **embedding)(self.embedding)
        Models(self.ctx, self.options.version).add_to(router)
        return router

    async def chat(self, request: Request) -> Response:
        body = await parse_body(request, self._chat_body)
        name = checked_name(self.client.info, body.model)
        if not body.messages:
            return json_response(loaded(name, chat=True, unload=body.keep_alive == 0))
        messages = template_messages(body.messages)
        # The body stays until the answer has ended, and pictures are large.
        body.messages.clear()
        turn = await self._turn(request, body, messages, chat_tools(body.tools))
        return await self._answer(request, body, turn, AnswerWriter(name, turn.stream(), chat=True))

    async def generate(self, request: Request) -> Response:
        body = await parse_body(request, self._generate_body)
        name = checked_name(self.client.info, body.model)
        if not (body.prompt or body.images):
            return json_response(loaded(name, chat=False, unload=body.keep_alive == 0))
        if body.raw or not self.client.tokenizer.has_chat_template:
            if body.images:
                raise InvalidRequest("images are for prompts that the chat template writes", param="images")
            prompt = "\n\n".join(filter(None, [body.system, body.prompt]))
            asked = body.engine_request(prompt, body.grammar(), add_special_tokens=True)
            return await self._submitted(request, body, asked, AnswerWriter(name, None, chat=False))
        system: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, user_message(body.prompt, body.images)]
        body.images.clear()
        turn = await self._turn(request, body, messages, Tools())
        return await self._answer(request, body, turn, AnswerWriter(name, turn.stream(), chat=False))

    async def embed(self, request: Request) -> Response:
        began = time.perf_counter_ns()
        body = await parse_body(request, EmbedBody)
        name = checked_name(self.client.info, body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        if len(texts) > MAX_INPUTS:
            raise InvalidRequest(f"input may have at most {MAX_INPUTS} entries, got {len(texts)}", param="input")
        found = await self._embedded(request, body, texts, name, normalize=True)
        return json_response(
            {
                "model": name,
                "embeddings": [embedding.vector for embedding in found],
                "total_duration": time.perf_counter_ns() - began,
                "load_duration": 0,
                "prompt_eval_count": sum(embedding.prompt_tokens for embedding in found),
            }
        )

    async def embedding(self, request: Request) -> Response:
        body = await parse_body(request, EmbeddingBody)
        name = checked_name(self.client.info, body.model)
        [found] = await self._embedded(request, body, [body.prompt], name, normalize=False)
        return json_response({"embedding": found.vector})

    async def _turn(
        self, request: Request, body: GeneratingBody, messages: Sequence[dict[str, object]], tools: Tools
    ) -> Turn:
        return await take_turn(self.ctx, request, messages, tools=tools, grammar=body.grammar(), hints=body.hints)

    async def _answer(self, request: Request, body: GeneratingBody, turn: Turn, writer: AnswerWriter) -> Response:
        asked = body.engine_request(turn.prompt, turn.grammar, skip_special_tokens=turn.skip_special_tokens)
        return await self._submitted(request, body, asked, writer)

    async def _submitted(
        self, request: Request, body: GeneratingBody, asked: GenerateRequest, writer: AnswerWriter
    ) -> Response:
        asked.model = writer.model
        try:
            answers = await until_disconnect(request, Answers.submit(self.client, [asked]))
        except InvalidRequest as error:
            raise error.called(NAMES) from None
        if body.stream:
            return LineStream(
                _lines(answers, writer), close=answers.aclose, error=lambda error: line(error_data(error))
            )
        try:
            await until_disconnect(request, _read(answers, writer))
        except InvalidRequest as error:
            raise error.called(NAMES) from None
        return json_response(writer.end(answers.answers[0], whole=True))

    async def _embedded(
        self, request: Request, body: EmbedBody | EmbeddingBody, texts: Sequence[str], model: str, *, normalize: bool
    ) -> list[Embedding]:
        dimensions = body.dimensions if isinstance(body, EmbedBody) else None
        field = "input" if isinstance(body, EmbedBody) else "prompt"
        if not all(texts):
            raise InvalidRequest(f"{field} is empty", param=field)
        if dimensions is not None and dimensions < 1:
            raise InvalidRequest(f"dimensions must be at least 1, got {dimensions}", param="dimensions")
        asked = [
            EmbedRequest(
                prompt=text,
                priority=body.priority,
                cache_salt=body.salt,
                normalize=normalize,
                dimensions=dimensions,
                params=body.params,
                model=model,
            )
            for text in texts
        ]
        try:
            return await until_disconnect(request, self.client.embed(asked)) if asked else []
        except InvalidRequest as error:
            raise error.called({"prompt": field}) from None


def _docs(body: type[BaseModel], example: Mapping[str, object], answers: Documented) -> Documented:
    """Return arguments of a route that takes prompts."""
    return {"openapi_extra": body_docs(body, example), "responses": {**answers, **ERRORS}, "dependencies": [LARGE]}


async def _parts(answers: Answers, writer: AnswerWriter) -> AsyncGenerator[Part, None]:
    async for _, chunk in answers.chunks():
        for part in writer.more(chunk.text):
            yield part
    [answer] = answers.answers
    for part in writer.rest(ended=reason_of(answer) == "stop"):
        yield part


async def _lines(answers: Answers, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    async for part in _parts(answers, writer):
        yield line(writer.line(part))
    yield line(writer.end(answers.answers[0]))


async def _read(answers: Answers, writer: AnswerWriter) -> None:
    """Read a whole answer."""
    try:
        async for _ in _parts(answers, writer):
            pass
    finally:
        await answers.aclose()
