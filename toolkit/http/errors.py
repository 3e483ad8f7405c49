"""Errors of API routes: their form, and writing them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Response

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.answers import json_response

CLIENT_CLOSED_REQUEST = 499
"""The status, nginx's, of an answer whose client has gone."""
_RETRY_AFTER = {"not_ready": "5", "shutting_down": "5"}


class ClientDisconnected(Exception):
    """The client has gone, so there is no one to answer."""


def error_body(
    message: str, *, status: int = 400, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Return an error in OpenAI's shape, which the native routes share."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: InvalidRequest) -> Response:
    """Return the answer to a refused request."""
    body = error_body(error.message, status=error.status, param=error.param or None, code=error.code)
    return json_response(body, error.status)


ErrorWriter = Callable[[InvalidRequest], Response]
"""Makes an answer of an error, in one API's format; `error_response` is the one that most share."""


def answer_error(error: InvalidRequest, write: ErrorWriter = error_response) -> Response:
    """Return what `write` makes of an error; 429 and 503 say after how many seconds it is worth trying again."""
    response = write(error)
    if error.status in (429, 503):
        response.headers.setdefault("retry-after", _RETRY_AFTER.get(error.code, "1"))
    return response
