"""/invocations, SageMaker's one route for whatever a model does: the body says which other route it is meant for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Message

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import MOST_TEXT, SMALL_BODY, RequestModel
from pegboard.toolkit.http.errors import ClientDisconnected
from pegboard.toolkit.http.levels import LARGE
from pegboard.toolkit.http.long_strings import LongStrings
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer

Handler = Callable[[Request], Awaitable[Response]]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class InvocationBody(RequestModel):
    """Body of `/invocations`: that of another route, which these fields tell: `messages` a chat's, `prompt` a
    completion's, `documents` with a query a ranking's, `input` an embedding's, and the others a score's.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    documents: list[str | dict[str, Any]] | None = None
    input: str | list[str] | list[int] | list[list[int]] | None = None
    text_1: str | list[str] | None = None
    items: str | list[str] | list[list[int]] | None = None
    stream: bool = False


class Invocations:
    """The route. `handlers` are those of other routes, by the field that tells of each; the first one found counts."""

    def __init__(self, handlers: Mapping[str, Handler], example: Mapping[str, Any]) -> None:
        self._handlers = handlers
        self._example = example

    def add_to(self, router: APIRouter) -> None:
        answer = {"type": "object", "description": "What the other route answers."}
        docs: dict[str, Any] = {
            "openapi_extra": body_docs(InvocationBody, self._example),
            "responses": {
                **json_answer(answer, events="As the other route's."),
                **error_responses(404, 409, 429, 504),
            },
            "dependencies": [LARGE],
        }
        summary = "Whatever the body is for: a chat, a completion, embeddings, a score, a ranking"
        router.post("/invocations", summary=summary, **docs)(self.dispatch)

    async def dispatch(self, request: Request) -> Response:
        data = bytearray()
        try:
            async for piece in request.stream():
                data += piece
        except ClientDisconnect:
            raise ClientDisconnected from None
        names = await asyncio.to_thread(_names_of_large, request, data) if len(data) > SMALL_BODY else _names(data)
        for name, handler in self._handlers.items():
            if name in names:
                again = _again(request, data)
                # What the handler has read is forgotten with it.
                del data
                return await handler(again)
        known = ", ".join(self._handlers)
        raise InvalidRequest(f"the body must have one of the fields {known}", param=next(iter(self._handlers)))


def _names_of_large(request: Request, data: bytearray) -> frozenset[str]:
    return _names(LongStrings.taken_out(data, request.scope.get("extensions", {}).get(MOST_TEXT)).rest)


def _names(data: bytes | bytearray) -> frozenset[str]:
    """Return the fields of a body that are there and not null. Raises InvalidRequest for what is not a JSON object."""
    try:
        found = _FIELDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body must be a JSON object: {error}"[:300], code="malformed_json") from None
    return frozenset(name for name, value in found.items() if bytes(value) != b"null")


def _again(request: Request, data: bytearray) -> Request:
    """Return the same request, whose body can be read once more and is forgotten by then."""
    pieces = [data]

    async def receive() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        return await request.receive()

    return Request(request.scope, receive)
