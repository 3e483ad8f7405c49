"""Descriptions of routes for the OpenAPI document: bodies, answers, errors, examples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel


def body_docs(model: type[BaseModel], example: Mapping[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body with `parse_body`: its schema, and an example that works."""
    content = {"schema": _schema_of(model, "validation"), "example": dict(example)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


class ErrorDetail(BaseModel):
    """What is wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


_MEANINGS = {
    400: "The request is wrong; the error names the field.",
    401: "The key is missing or wrong.",
    403: "This key does not allow it.",
    404: "There is no such thing.",
    405: "The path does not take this method.",
    408: "The request took too long to arrive.",
    409: "It is in conflict with what the server is doing.",
    413: "The request body is too large.",
    429: "Too many requests; try again later.",
    415: "The body is packed in a way that is not understood.",
    431: "The request's headers are too large.",
    499: "The client left, or the request was aborted.",
    500: "The server failed.",
    501: "This server does not offer it.",
    503: "The server is starting, stopping or full; try again later.",
    504: "The request waited too long.",
    507: "There is no room on the disk.",
}
ERROR_SCHEMA = "#/components/schemas/ErrorAnswer"
"""Where the server's OpenAPI document has ErrorAnswer."""
COMMON_ERRORS = (400, 413, 500, 503)
"""Statuses that every route may answer with; those about keys are the server's to document."""


def error_responses(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route: COMMON_ERRORS and these further statuses, all with bodies like `model`.

    The server documents 401, 403 and what else it answers with itself; a router need not name those::

        router.post("/count", responses={**json_answer(Count), **error_responses(404)})
    """
    # The server's document has the schema that most share; a model would have FastAPI make a field for every status.
    schema = {"$ref": ERROR_SCHEMA} if model is ErrorAnswer else _schema_of(model, "serialization")
    return {
        status: {
            "description": _MEANINGS.get(status, "An error."),
            "content": {"application/json": {"schema": schema}},
        }
        for status in sorted({*COMMON_ERRORS, *statuses})
    }


def json_answer(
    schema: type[BaseModel] | Mapping[str, Any], description: str = "The answer.", *, events: str = ""
) -> dict[int | str, Any]:
    """FastAPI's `responses` of a route whose success is JSON: a pydantic model, or a JSON schema as it stands. `events`
    describes the server-sent events of a route that can stream instead.
    """
    plain = schema if isinstance(schema, Mapping) else _schema_of(schema, "serialization")
    content: dict[str, Any] = {"application/json": {"schema": dict(plain)}}
    if events:
        # OpenAPI does not say what a schema of a stream is about, so there is none.
        content["text/event-stream"] = {"schema": {"description": events}}
    return {200: {"description": description, "content": content}}


def example_of(route: object) -> dict[str, object] | None:
    """Return the example that `body_docs` gave a route, if any."""
    extra = getattr(route, "openapi_extra", None) or {}
    content = extra.get("requestBody", {}).get("content", {})
    example = content.get("application/json", {}).get("example")
    return dict(example) if isinstance(example, Mapping) else None


@functools.cache
def _schema_of(model: type[BaseModel], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    """Return a model's schema without references; to be read only."""
    return dict(_inlined(model.model_json_schema(mode=mode)))


def _inlined(schema: dict[str, Any]) -> Any:
    definitions = schema.pop("$defs", {})

    def replace(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return replace(definitions[node["$ref"].rpartition("/")[2]])
            return {name: replace(value) for name, value in node.items()}
        return [replace(value) for value in node] if isinstance(node, list) else node

    return replace(schema)
