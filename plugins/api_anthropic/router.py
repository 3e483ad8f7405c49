"""The Anthropic-compatible routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.answers import MessageAnswer, TokenCount
from pegboard.plugins.api_anthropic.errors import (
    OVERLOADED,
    REQUEST_ID,
    ErrorAnswer,
    error_event,
    new_request_id,
    write_error,
)
from pegboard.plugins.api_anthropic.models import Models
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.requests import BUDGET, MessagesBody, PromptBody, new_id
from pegboard.plugins.api_anthropic.responses import PING, MessageWriter
from pegboard.toolkit.chat.thinking import budget_params
from pegboard.toolkit.chat.turn import Turn, take_turn
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import EventStream, until_disconnect
from pegboard.toolkit.http.generation import Answers, check_model
from pegboard.toolkit.http.levels import LARGE, USER
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer
from pegboard.toolkit.http.request_fields import with_declared
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.media.service import reader_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import GenerateRequest
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.toolkit.chat.tool_calls import Tools


class AnthropicRouter(ApiRouter[AnthropicOptions]):
    """/v1/messages, whole and streamed, /v1/messages/count_tokens, and /v1/models for Anthropic's clients."""

    def __init__(self, options: AnthropicOptions, ctx: ApiContext) -> None:
        super().__init__(options, ctx)
        self._body = with_declared(MessagesBody, ctx.body_fields)

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        return frozenset(MessagesBody.model_fields)

    def routes(self) -> APIRouter:
        router = api_router(errors=write_error, tags=["anthropic"], dependencies=[USER, LARGE])
        conversation = {
            "model": self.client.info.served_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        errors = error_responses(404, OVERLOADED, model=ErrorAnswer)
        answer = json_answer(MessageAnswer, "The message.", events="From message_start to message_stop.")
        router.post(
            "/v1/messages",
            summary="Answer a conversation",
            openapi_extra=body_docs(self._body, {**conversation, "max_tokens": 32, "temperature": 0}),
            responses={**answer, **errors},
        )(self.messages)
        router.post(
            "/v1/messages/count_tokens",
            summary="Count the tokens of a conversation",
            openapi_extra=body_docs(PromptBody, conversation),
            responses={**json_answer(TokenCount), **errors},
        )(self.count_tokens)
        router.routes.extend(Models(self.client).routes().routes)
        return router

    async def messages(self, request: Request) -> Response:
        body = await parse_body(request, self._body)
        check_model(self.client.info, body.model)
        body.check()
        tools = body.checked_tools()
        turn = await self._turn(request, body, tools, body.grammar())
        # The body stays until the answer has ended, and images are large.
        body.messages.clear()
        rid = new_id(body.rid)
        request_id = getattr(request.state, "request_id", "") or new_request_id()
        budget = budget_params(self.ctx, turn, body.budget, BUDGET, wish=True)
        answers = await self._submit(request, body.engine_request(turn, rid, budget), body.names)
        writer = MessageWriter(
            rid, self.client.info.served_name, turn.stream(), max_tokens=body.max_tokens, thinking=body.shown_thinking
        )
        headers = {REQUEST_ID: request_id}
        if body.stream:
            return EventStream(
                with_pings(_events(answers, writer), self.options.ping_interval),
                close=answers.aclose,
                error=lambda error: error_event(error, request_id),
                done=b"",
                headers=headers,
            )
        with _called(body.names):
            [answer] = await until_disconnect(request, answers.collect())
        response = json_response(writer.message(answer))
        response.headers.update(headers)
        return response

    async def count_tokens(self, request: Request) -> Response:
        body = await parse_body(request, PromptBody)
        check_model(self.client.info, body.model)
        body.check_prompt()
        turn = await self._turn(request, body, body.checked_tools(), None)
        counting = self.client.count_tokens(turn.prompt, add_special_tokens=False)
        return json_response({"input_tokens": await until_disconnect(request, counting)})

    async def _turn(self, request: Request, body: PromptBody, tools: Tools, grammar: Grammar | None) -> Turn:
        return await take_turn(
            self.ctx,
            request,
            body.template_messages(reader_of(self.client)),
            tools=tools,
            grammar=grammar,
            kwargs=body.chat_template_kwargs,
            hints=body.template_hints(),
            continue_final_message=body.prefilled,
        )

    async def _submit(self, request: Request, asked: GenerateRequest, names: Mapping[str, str]) -> Answers:
        with _called(names):
            return await until_disconnect(request, Answers.submit(self.client, [asked]))


@contextlib.contextmanager
def _called(names: Mapping[str, str]) -> Iterator[None]:
    """Say what the engine refuses in the body's words (`names`). It may refuse a grammar after it has accepted the
    request.
    """
    try:
        yield
    except InvalidRequest as error:
        raise error.called(names) from None


async def _events(answers: Answers, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    """Yield the stream, which begins with the first token: clients want to know first what was cached."""
    [answer] = answers.answers
    begun = False
    async for _, chunk in answers.chunks():
        if not begun:
            begun = True
            yield writer.start(answer)
        if frames := writer.more(chunk.text):
            yield frames
    yield writer.end(answer)


async def with_pings(frames: AsyncGenerator[bytes, None], interval: float) -> AsyncGenerator[bytes, None]:
    """`frames`, with a ping whenever `interval` seconds have passed without one."""
    async with contextlib.aclosing(frames):
        while True:
            coming = asyncio.ensure_future(anext(frames, b""))
            try:
                while not (await asyncio.wait({coming}, timeout=interval))[0]:
                    yield PING
                frame = coming.result()
            finally:
                coming.cancel()
                await asyncio.wait({coming})
            if not frame:
                return
            yield frame
