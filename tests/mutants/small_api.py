"""A small API that does everything right, for mutants that do one thing wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.chat.rendering import render_chat
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.events import EventStream, event, until_disconnect
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.levels import PUBLIC, USER
from pegboard.toolkit.http.line_stream import LineStream, line
from pegboard.toolkit.http.openapi import body_docs
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.media.inputs import MediaPrompt

EXAMPLE = {"text": "The capital of France is", "temperature": 0.0, "max_tokens": 16}


class TextBody(RequestModel):
    """Body of `/text`."""

    text: str
    temperature: float = 1.0
    max_tokens: int = 16
    stop: str | list[str] = []
    stream: bool = False
    notes: dict[str, Any] = {}

    def request(self) -> GenerateRequest:
        names = {"temperature": "temperature", "max_new_tokens": "max_tokens", "stop": "stop"}
        said = {name: getattr(self, own) for name, own in names.items() if own in self.model_fields_set}
        return GenerateRequest(prompt=self.text, sampling=SamplingParams.of(said))


class SmallApi(ApiRouter):
    """POST /text, whole or streamed, and GET /alive."""

    def routes(self) -> APIRouter:
        router = api_router(dependencies=[USER])
        router.post("/text", summary="Go on with a text", openapi_extra=body_docs(TextBody, EXAMPLE))(self.text)
        router.get("/alive", summary="Whether it lives", dependencies=[PUBLIC])(self.alive)
        return router

    async def text(self, request: Request) -> Response:
        return await self.answer(request, await parse_body(request, TextBody))

    async def answer(self, request: Request, body: TextBody) -> Response:
        answers = await until_disconnect(request, Answers.submit(self.client, [body.request()]))
        if body.stream:
            return self.streamed(answers)
        [answer] = await until_disconnect(request, answers.collect())
        return json_response({"text": answer.text})

    def streamed(self, answers: Answers) -> Response:
        return EventStream(events(answers), close=answers.aclose)

    async def alive(self) -> Response:
        return Response()


async def events(answers: Answers) -> AsyncGenerator[bytes, None]:
    """One event per piece of text."""
    async for _, chunk in answers.chunks():
        yield event({"text": chunk.text})


class SmallChat(SmallApi):
    """The same for a conversation of one message."""

    async def answer(self, request: Request, body: TextBody) -> Response:
        asked = body.request()
        asked.prompt = await until_disconnect(request, self.prompt(body.text))
        answers = await until_disconnect(request, Answers.submit(self.client, [asked]))
        if body.stream:
            return self.streamed(answers)
        [answer] = await until_disconnect(request, answers.collect())
        return json_response({"text": answer.text})

    async def prompt(self, text: str) -> str | MediaPrompt:
        return await render_chat(self.client, [{"role": "user", "content": text}])


class SmallLines(SmallApi):
    """The same, which streams lines."""

    def streamed(self, answers: Answers) -> Response:
        return LineStream(lines(answers), close=answers.aclose)


async def lines(answers: Answers) -> AsyncGenerator[bytes, None]:
    """One line per piece of text, and a last one."""
    async for _, chunk in answers.chunks():
        yield line({"piece": chunk.text})
    yield line({"done": True})
