"""Request bodies: reading, limits and validation, with errors that name the field.

A router that uses `api_router`, `parse_body` and `EventStream` answers bad input with 400 and the field's name, passes
on the status of an InvalidRequest, aborts what a vanished client asked for, and ends every stream in
``data: [DONE]``::

    class Body(RequestModel):
        text: str

    router = api_router()

    @router.post("/count", summary="Count characters", openapi_extra=body_docs(Body, {"text": "hello"}))
    async def count(request: Request) -> Response:
        body = await parse_body(request, Body)
        return json_response({"characters": len(body.text)})
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema, from_json, to_json
from starlette.requests import ClientDisconnect

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.errors import ClientDisconnected
from pegboard.toolkit.http.long_strings import LongStrings
from pegboard.toolkit.http.value_size import memory_of

M = TypeVar("M", bound="RequestModel")
SMALL_BODY = 64 * 1024
"""Most bytes of a body that is parsed at once and needs no room in the server's budget; a larger one waits its turn."""
PARSE_TURN = "pegboard.parse_turn"
"""The ASGI extension of a server that has large bodies parsed in turn: makes a context manager for one turn, with a
function that is to be told how many bytes of memory the parsed values take.
"""
MOST_BODY = "pegboard.most_body"
"""The ASGI extension that says how many bytes the body of a request may have."""
ANY_SIZE = 2**63
"""What it says where a route reads its body piece by piece."""
MOST_TEXT = "pegboard.most_text"
"""The ASGI extension of a server that bounds large bodies apart from media: most bytes beside those
in base64.
"""
MAX_ENTRIES = 10_000
"""Most entries of an object of a request whose values have a type, such as `logit_bias`."""


def _bounded(node: Any) -> Any:
    """Return a core schema in which neither lists nor objects collect errors without end."""
    if isinstance(node, list):
        return [_bounded(one) for one in node]
    if isinstance(node, tuple):
        return tuple(_bounded(one) for one in node)
    if not isinstance(node, dict):
        return node
    kept = ("default", "metadata", "serialization")
    out = {name: one if name in kept else _bounded(one) for name, one in node.items()}
    if out.get("type") in ("list", "set", "frozenset", "tuple"):
        out["fail_fast"] = True
    elif out.get("type") == "dict" and out.get("values_schema", {"type": "any"}).get("type") != "any":
        return core_schema.no_info_before_validator_function(_few_entries, cast(CoreSchema, out))
    return out


def _few_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"may have at most {MAX_ENTRIES} entries, got {len(value)}")
    return value


class RequestModel(BaseModel):
    """Base of request bodies: known fields have strict types, unknown ones are ignored, null stands for the default.

    The first wrong entry of a list ends the validation: pydantic would collect an error for each of millions. Objects
    with wrong entries are bounded by MAX_ENTRIES instead.
    """

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _bounded(handler(source))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: object) -> object:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


def too_large(most: int) -> InvalidRequest:
    """Return the refusal of a body with more bytes than there may be."""
    return InvalidRequest(f"the body exceeds {most} bytes", status=413, code="body_too_large")


async def parse_body(request: Request, model: type[M]) -> M:
    """Return the request's JSON body. Raises InvalidRequest (400) for anything else, naming the first field that is
    wrong, and ClientDisconnected where the client leaves before it has sent all of it.

    The bytes are gone afterwards: ``request.body()`` would keep them for as long as the request runs.
    """
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
    except ClientDisconnect:
        raise ClientDisconnected from None
    if len(data) <= SMALL_BODY:
        return validate_body(data, model)
    extensions = request.scope.get("extensions", {})
    async with extensions.get(PARSE_TURN, contextlib.nullcontext)() as parsed:
        body = await asyncio.to_thread(validate_large, data, model, extensions.get(MOST_TEXT))
        if parsed is not None:
            parsed(await asyncio.to_thread(memory_of, body))
        return body


def validate_large(data: bytearray, model: type[M], most: int | None) -> M:
    """Return `validate_body` of a body, in whose parse no other thread runs, without having it read media. Raises
    InvalidRequest (413) where it has more than `most` bytes beside them.
    """
    found = LongStrings.taken_out(data, most)
    # Its bytes are not needed twice.
    data.clear()
    try:
        body = validate_body(found.rest, model)
    except InvalidRequest as error:
        raise InvalidRequest(found.in_body(error.message), param=error.param, code=error.code) from None
    found.put_back(body)
    return body


def validate_body(data: bytes | bytearray, model: type[M]) -> M:
    """`parse_body` of bytes."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        if not any(map(_is_whole, error.errors(include_url=False))):
            raise _invalid(error, data=data) from None
    texts = LongStrings()
    try:
        # Both are pydantic's own, which have NaN and infinity as its parser does. Long texts are not written and read
        # once more: no other thread runs meanwhile.
        whole = to_json(_with_integers(from_json(data), texts.take_long), inf_nan_mode="constants")
        body = model.model_validate_json(whole)
    except ValidationError as error:
        raise _invalid(error) from None
    texts.put_back(body)
    return body


def validate_part(data: Mapping[str, object], model: type[M], field: str) -> M:
    """Return a nested object of a body that has been parsed already; errors name it as ``<field>.<name>``."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        if not any(map(_is_whole, error.errors(include_url=False))):
            raise _invalid(error, field) from None
    try:
        return model.model_validate(_with_integers(dict(data)))
    except ValidationError as error:
        raise _invalid(error, field) from None


# JSON has one kind of numbers, and some languages write all of them with a point. Strict models refuse 2.0 for an
# integer, so a body in which that is wrong is validated once more; others never pay for it.


def _is_whole(error: Any) -> bool:
    return error["type"] == "int_type" and isinstance(error["input"], float) and error["input"].is_integer()


def _with_integers(value: object, text: Callable[[str], str] = lambda text: text) -> object:
    """Return a JSON value in which whole numbers are integers, as far as floats are exact. Strings that are values are
    what `text` makes of them.
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= 2**53 else value
    if isinstance(value, dict):
        return {name: _with_integers(one, text) for name, one in value.items()}
    return [_with_integers(one, text) for one in value] if isinstance(value, list) else value


_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


def _invalid(error: ValidationError, prefix: str = "", data: bytes | bytearray = b"") -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        if "hex escape" in first["msg"] and _HALF_CHARACTER.search(data):
            where = first["msg"].rpartition(" at ")[2]
            message = f"the body has half a character, a surrogate such as \\ud800 without its other half, at {where}"
            return InvalidRequest(message, code="malformed_json")
        return InvalidRequest(f"the body is not valid JSON: {first['msg'].partition(': ')[2]}", code="malformed_json")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object", code="malformed_json")
    # A union reports every alternative that did not fit, each at a place of its own.
    same = [one for one in problems if one["loc"][0] == first["loc"][0]]
    nested = all(one["loc"] == first["loc"] for one in same)
    path = ".".join([*filter(None, [prefix]), *map(str, first["loc"] if nested else first["loc"][:1])])
    said = list(dict.fromkeys(one["msg"] for one in same))[:4]
    return InvalidRequest(f"{path}: {'; or '.join(said)}", param=path, code="invalid_type")
