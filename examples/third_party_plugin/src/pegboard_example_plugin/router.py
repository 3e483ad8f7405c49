"""Completions of texts: `POST /lines` answers with lines of JSON, or with one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pegboard.core.interfaces import ApiRouter, GenerateRequest, InvalidRequest
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import Answers, SamplingFields
from pegboard.toolkit.http.levels import LARGE, USER
from pegboard.toolkit.http.line_stream import LineStream, line, line_answer
from pegboard.toolkit.http.openapi import body_docs
from pegboard.toolkit.http.routing import api_router

from pegboard_example_plugin.options import CompletionLinesOptions

if TYPE_CHECKING:
    from fastapi import APIRouter, Response

EXAMPLE = {"text": "Once upon a time", "max_tokens": 32, "temperature": 0}
ANSWER = {"type": "object", "properties": {"text": {"type": "string"}, "tokens": {"type": "integer"}}}
NAMES = {"prompt": "text", "max_new_tokens": "max_tokens"}
"""What the engine's fields are called here, for its errors."""


class LinesBody(SamplingFields):
    """A request; SamplingFields brings temperature, stop, seed, custom_params and what else APIs spell alike."""

    text: str
    max_tokens: int | None = None
    stream: bool = True


class CompletionLines(ApiRouter[CompletionLinesOptions]):
    """Nothing of a request is kept here: one instance serves all of them at one time."""

    def routes(self) -> APIRouter:
        router = api_router(errors=lambda error: json_response(error_data(error), error.status))
        router.post(
            "/lines",
            summary="Complete a text, in lines of JSON",
            dependencies=[USER, LARGE],
            openapi_extra=body_docs(LinesBody, EXAMPLE),
            responses=line_answer(ANSWER, lines="A line for each piece of text, and a last one with the end."),
        )(self.lines)
        return router

    async def lines(self, request: Request) -> Response:
        body = await parse_body(request, LinesBody)
        # A refusal has a status of its own, so the stream is made when the engine has accepted the request.
        answers = await until_disconnect(request, self._submit(body))
        if body.stream:
            return LineStream(
                pieces(answers),
                close=answers.aclose,
                error=lambda error: line(error_data(error)),
                keep_alive=self.options.keep_alive,
            )
        [answer] = await until_disconnect(request, answers.collect())
        return json_response({"text": answer.text, **end_of(answers)})

    async def _submit(self, body: LinesBody) -> Answers:
        length = self.options.max_tokens if body.max_tokens is None else body.max_tokens
        sampling = body.sampling_params(max_new_tokens=length, min_new_tokens=0)
        wanted = GenerateRequest(prompt=body.text, sampling=sampling, stream=body.stream)
        try:
            return await Answers.submit(self.client, [wanted])
        except InvalidRequest as error:
            raise error.called(NAMES) from None


async def pieces(answers: Answers) -> AsyncGenerator[bytes, None]:
    """A line for each piece, and the last one."""
    async for _, chunk in answers.chunks():
        if chunk.text:
            yield line({"piece": chunk.text})
    yield line(end_of(answers))


def end_of(answers: Answers) -> dict[str, Any]:
    """How an answer ended."""
    [answer] = answers.answers
    return {"tokens": answer.completion_tokens, "cached": answer.cached_tokens, "why": answer.finish_reason}


def error_data(error: InvalidRequest) -> dict[str, Any]:
    """An error, as a body and as the last line of a stream."""
    return {"error": error.message, "field": error.param, "code": error.code}
