"""The OpenAI-compatible routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.generation import Answers
from pegboard.core.toolkit.http import (
    USER,
    EventStream,
    api_router,
    body_docs,
    event,
    json_response,
    parse_body,
    until_disconnect,
)
from pegboard.plugins.api_openai.requests import ChatBody, CommonBody, CompletionBody, new_id
from pegboard.plugins.api_openai.responses import ChatWriter, CompletionWriter, Writer, model_card, usage

TEMPLATE_TIMEOUT = 20.0
"""Seconds that a chat template may take."""


class OpenAIRouter(ApiRouter):
    """/v1/models, /v1/chat/completions and /v1/completions, whole and streamed."""

    def routes(self) -> APIRouter:
        router = api_router(tags=["openai"], dependencies=[USER])
        name = self.client.info.served_name
        question = {"role": "user", "content": "What is the capital of France?"}
        chat_docs = body_docs(ChatBody, {"model": name, "messages": [question], "max_tokens": 32, "temperature": 0})
        text_docs = body_docs(
            CompletionBody, {"model": name, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        )
        post = router.post
        if self.client.tokenizer.has_chat_template:
            post("/v1/chat/completions", summary="Answer a conversation", openapi_extra=chat_docs)(self.chat)
            post("/v1/completions", summary="Continue a text", openapi_extra=text_docs)(self.completions)
        else:
            post("/v1/completions", summary="Continue a text", openapi_extra=text_docs)(self.completions)
            post("/v1/chat/completions", summary="Answer a conversation: this model has no chat template")(self.chat)
        router.get("/v1/models", summary="The models that are served")(self.models)
        router.get("/v1/models/{model:path}", summary="One model")(self.model)
        return router

    async def chat(self, request: Request) -> Response:
        body = await parse_body(request, ChatBody)
        self._check_model(body.model)
        body.check()
        prompt = await self._render(body)
        rid = new_id("chatcmpl", body.rid)
        logprobs = body.top_logprobs if body.logprobs else None
        requests = body.engine_requests(
            [prompt], rid=rid, max_new_tokens=body.limit, logprobs=logprobs, add_special_tokens=False
        )
        writer = ChatWriter(rid, self.client.info.served_name, self.client.tokenizer, logprobs)
        return await self._answer(request, body, requests, writer)

    async def completions(self, request: Request) -> Response:
        body = await parse_body(request, CompletionBody)
        self._check_model(body.model)
        body.check()
        prompts = body.prompts()
        rid = new_id("cmpl", body.rid)
        requests = body.engine_requests(
            prompts, rid=rid, max_new_tokens=body.limit, logprobs=body.logprobs, add_special_tokens=True
        )
        echoes = [self._text(one.prompt) if body.echo else "" for one in requests]
        writer = CompletionWriter(rid, self.client.info.served_name, self.client.tokenizer, body.logprobs, echoes)
        return await self._answer(request, body, requests, writer)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return json_response(self._card())

    async def _answer(
        self, request: Request, body: CommonBody, requests: Sequence[GenerateRequest], writer: Writer
    ) -> Response:
        answers = await until_disconnect(request, Answers.submit(self.client, requests))
        if body.stream:
            return EventStream(_events(body, answers, writer), close=answers.aclose)
        return json_response(writer.body(await until_disconnect(request, answers.collect()), body.n))

    async def _render(self, body: ChatBody) -> str:
        """The conversation as text. Templates are the model's code: they run in a thread, and not for ever."""
        kwargs = body.template_kwargs()
        messages = body.template_messages()
        render = asyncio.to_thread(self.client.tokenizer.apply_chat_template, messages, **kwargs)
        try:
            return await asyncio.wait_for(render, TEMPLATE_TIMEOUT)
        except TimeoutError:
            raise InvalidRequest("the chat template takes too long for these messages", param="messages") from None

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.client.tokenizer.decode(prompt)

    def _check_model(self, model: str) -> None:
        info = self.client.info
        if model not in ("", info.served_name, info.path):
            raise InvalidRequest(
                f"the model {model[:256]!r} does not exist; this server has {info.served_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _card(self) -> dict[str, object]:
        info = self.client.info
        return model_card(info.served_name, info.created, info.max_context_len)


async def _events(body: CommonBody, answers: Answers, writer: Writer) -> AsyncGenerator[bytes, None]:
    # With usage asked for, every other chunk carries a null, as OpenAI's do.
    more = {"usage": None} if body.include_usage else {}
    for index in range(len(answers.answers)):
        if writer.opens(index):
            yield event(writer.chunk([writer.delta(index, "", None, first=True)], **more))
    async for index, chunk in answers.chunks():
        if chunk.text or chunk.logprobs or chunk.finish_reason is not None:
            yield event(writer.chunk([writer.delta(index, chunk.text, chunk, first=False)], **more))
    if body.include_usage:
        yield event(writer.chunk([], usage=usage(answers.answers, body.n)))
