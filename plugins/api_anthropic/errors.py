"""Errors in Anthropic's shape."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response
from pydantic import BaseModel

from pegboard.toolkit.http.events import event

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pegboard.core.interfaces.errors import InvalidRequest

OVERLOADED = 529
"""Anthropic's status for a server that has no room left."""

REQUEST_ID = "request-id"
"""The header in which Anthropic's clients look for the id."""

_FULL = frozenset({"queue_full", "grammar_queue_full", "overloaded"})

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ErrorCause(BaseModel):
    """For programs: a word that names the cause, and the field that is to blame, if one is."""

    error_code: str
    param: str | None


class ErrorDetail(BaseModel):
    """What is wrong: the kind of error, a sentence, and the cause."""

    type: str
    message: str
    details: ErrorCause


class ErrorAnswer(BaseModel):
    """Anthropic's error body."""

    type: str = "error"
    error: ErrorDetail
    request_id: str


def status_of(error: InvalidRequest) -> int:
    """Return the HTTP status: 529 where a queue is full, which Anthropic's clients know as being overloaded."""
    return OVERLOADED if error.status == 503 and error.code in _FULL else error.status


def error_body(error: InvalidRequest, request_id: str) -> dict[str, object]:
    """Return the body. The message names the field too: `details` are an addition that not every client knows."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    details = {"error_code": error.code, "param": error.param or None}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}, "request_id": request_id}


def write_error(error: InvalidRequest) -> Response:
    """Return the answer to a refused request."""
    return _ErrorResponse(error)


class _ErrorResponse(Response):
    """Learns the request's id, which the server has given it, when it is sent."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(status_code=status_of(error), media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope.get("state", {}).get("request_id") or new_request_id()
        self.body = msgspec.json.encode(error_body(self._error, request_id))
        self.headers["content-length"] = str(len(self.body))
        self.headers[REQUEST_ID] = request_id
        await super().__call__(scope, receive, send)


def error_event(error: InvalidRequest, request_id: str) -> bytes:
    """Return an error in the middle of a stream."""
    return event(error_body(error, request_id), "error")


def new_request_id() -> str:
    """Return an id where the server gives none."""
    return f"req_{uuid.uuid4().hex}"
