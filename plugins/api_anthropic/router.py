"""The Anthropic-compatible routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.toolkit.generation import Answers, check_model
from pegboard.core.toolkit.http import (
    USER,
    EventStream,
    api_router,
    body_docs,
    error_responses,
    json_answer,
    json_response,
    parse_body,
    until_disconnect,
)
from pegboard.core.toolkit.rendering import render_chat
from pegboard.core.toolkit.tool_calls import ChatStream, Tools, skip_special_tokens
from pegboard.plugins.api_anthropic.answers import MessageAnswer, TokenCount
from pegboard.plugins.api_anthropic.errors import (
    OVERLOADED,
    REQUEST_ID,
    ErrorAnswer,
    error_event,
    new_request_id,
    write_error,
)
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.requests import MessagesBody, PromptBody, new_id
from pegboard.plugins.api_anthropic.responses import PING, MessageWriter


class AnthropicRouter(ApiRouter):
    """/v1/messages, whole and streamed, and /v1/messages/count_tokens."""

    options: AnthropicOptions

    def routes(self) -> APIRouter:
        router = api_router(errors=write_error, tags=["anthropic"], dependencies=[USER])
        conversation = {
            "model": self.client.info.served_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        errors = error_responses(404, OVERLOADED, model=ErrorAnswer)
        answer = json_answer(MessageAnswer, "The message.", events="From message_start to message_stop.")
        router.post(
            "/v1/messages",
            summary="Answer a conversation",
            openapi_extra=body_docs(MessagesBody, {**conversation, "max_tokens": 32, "temperature": 0}),
            responses={**answer, **errors},
        )(self.messages)
        router.post(
            "/v1/messages/count_tokens",
            summary="Count the tokens of a conversation",
            openapi_extra=body_docs(PromptBody, conversation),
            responses={**json_answer(TokenCount), **errors},
        )(self.count_tokens)
        return router

    async def messages(self, request: Request) -> Response:
        body = await parse_body(request, MessagesBody)
        check_model(self.client.info, body.model)
        body.check()
        tools = body.checked_tools()
        of_tools = tools.grammar(self.ctx.tool_parser, features=self.client.info.features)
        forced = tools.active and tools.choice == "required"
        grammar = body.grammar(of_tools, forced=forced)
        messages = body.template_messages()
        prompt = await self._render(body, messages, tools)
        rid = new_id(body.rid)
        request_id = getattr(request.state, "request_id", "") or new_request_id()
        parsed = ChatStream(
            tools=tools,
            prompt=prompt,
            prefill=messages[-1]["content"] if body.prefilled else "",
            constrained=grammar is not None and (forced or grammar is not of_tools),
            tool_parser=self.ctx.tool_parser,
            reasoning_parser=self.ctx.reasoning_parser,
        )
        engine_request = body.engine_request(
            prompt,
            rid=rid,
            grammar=grammar,
            skip_special_tokens=skip_special_tokens(tools, self.ctx.tool_parser, self.ctx.reasoning_parser),
        )
        answers = await until_disconnect(request, Answers.submit(self.client, [engine_request]))
        writer = MessageWriter(
            rid, self.client.info.served_name, parsed, max_tokens=body.max_tokens, thinking=body.shown_thinking
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
        [answer] = await until_disconnect(request, answers.collect())
        response = json_response(writer.message(answer))
        response.headers.update(headers)
        return response

    async def count_tokens(self, request: Request) -> Response:
        body = await parse_body(request, PromptBody)
        check_model(self.client.info, body.model)
        prompt = await self._render(body, body.template_messages(), body.checked_tools())
        ids = await asyncio.to_thread(self.client.tokenizer.encode, prompt, add_special_tokens=False)
        return json_response({"input_tokens": len(ids)})

    async def _render(self, body: PromptBody, messages: list[dict[str, Any]], tools: Tools) -> str:
        return await render_chat(
            self.client,
            messages,
            tools=tools,
            tool_parser=self.ctx.tool_parser,
            add_generation_prompt=not body.prefilled,
            continue_final_message=body.prefilled,
            kwargs=body.chat_template_kwargs,
            hints=body.template_hints(),
        )


async def _events(answers: Answers, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    """The stream begins with the first token: what was cached is known then, and clients want to know it first."""
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
