"""A small API that does everything right, for mutants that do one thing wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.toolkit.generation import Answers
from pegboard.core.toolkit.http import (
    PUBLIC,
    USER,
    EventStream,
    RequestModel,
    api_router,
    body_docs,
    event,
    json_response,
    parse_body,
    until_disconnect,
)

EXAMPLE = {"text": "The capital of France is", "temperature": 0.0, "limit": 16}


class TextBody(RequestModel):
    """Body of `/text`."""

    text: str
    temperature: float = 1.0
    limit: int = 16
    stream: bool = False
    notes: dict[str, Any] = {}

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            prompt=self.text, sampling=SamplingParams(temperature=self.temperature, max_new_tokens=self.limit)
        )


class SmallApi(ApiRouter):
    """POST /text, whole or streamed, and GET /alive."""

    def routes(self) -> APIRouter:
        router = api_router(dependencies=[USER])
        router.post("/text", summary="Go on with a text", openapi_extra=body_docs(TextBody, EXAMPLE))(self.text)
        router.get("/alive", summary="Whether it lives", dependencies=[PUBLIC])(self.alive)
        return router

    async def text(self, request: Request) -> Response:
        body = await parse_body(request, TextBody)
        answers = await until_disconnect(request, Answers.submit(self.client, [body.request()]))
        if body.stream:
            return EventStream(events(answers), close=answers.aclose)
        [answer] = await until_disconnect(request, answers.collect())
        return json_response({"text": answer.text})

    async def alive(self) -> Response:
        return Response()


async def events(answers: Answers) -> AsyncGenerator[bytes, None]:
    """One event per piece of text."""
    async for _, chunk in answers.chunks():
        yield event({"text": chunk.text})
