"""For API plugins: request bodies, errors, and server-sent events, so that every route behaves alike.

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
import functools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema, from_json, to_json
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.http.value_size import memory_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound="RequestModel")

CLIENT_CLOSED_REQUEST = 499
"""The status, nginx's, of an answer that nobody is there to read."""

SMALL_BODY = 64 * 1024
"""Most bytes of a body that is parsed at once and needs no room in the server's budget; a larger one waits its turn."""

PARSE_TURN = "pegboard.parse_turn"
"""The ASGI extension of a server that has large bodies parsed in turn: makes a context manager for one turn, with a
function that is to be told how many bytes of memory the parsed values take.
"""

ASKED_BY = "asked_by"
"""In a scope's state: what `principal_of` gives."""

LARGE_ANSWER = 256 * 1024
"""Bytes from which on an answer is sent in pieces."""
_PIECE = 64 * 1024

_RETRY_AFTER = {"not_ready": "5", "shutting_down": "5"}


class ClientDisconnected(Exception):
    """The client has gone; there is nobody to answer."""


def error_body(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape, which the native routes share."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _LargeResponse(Response):
    """A body that is sent in pieces, as fast as the client takes them: one that reads slowly keeps the server waiting,
    and not a copy of the body in the connection's buffer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for at in range(0, len(body), _PIECE):
            more = at + _PIECE < len(body)
            await send({"type": "http.response.body", "body": bytes(body[at : at + _PIECE]), "more_body": more})


def json_response(data: Any, status: int = 200) -> Response:
    """`data` as JSON. Numbers that JSON does not know (a log-probability of minus infinity) become null."""
    body = msgspec.json.encode(data)
    kind = _LargeResponse if len(body) > LARGE_ANSWER else Response
    return kind(body, status_code=status, media_type="application/json")


async def built_response(build: Callable[[], Any], *, large: bool) -> Response:
    """`json_response` of what `build` returns. With `large` it is built in a thread, so that the event loop goes on."""
    if large:
        return await asyncio.to_thread(lambda: json_response(build()))
    return json_response(build())


def error_response(error: InvalidRequest) -> Response:
    """The answer to a refused request."""
    body = error_body(error.message, status=error.status, param=error.param or None, code=error.code)
    return json_response(body, error.status)


ErrorWriter = Callable[[InvalidRequest], Response]
"""Makes an answer of an error, in one API's format; `error_response` is the one that most share."""


def answer_error(error: InvalidRequest, write: ErrorWriter = error_response) -> Response:
    """What `write` makes of an error; 429 and 503 say after how many seconds it is worth trying again."""
    response = write(error)
    if error.status in (429, 503):
        response.headers.setdefault("retry-after", _RETRY_AFTER.get(error.code, "1"))
    return response


class GuardedRoute(APIRoute):
    """A route that answers InvalidRequest with its status, in its API's error format."""

    write_error: ErrorWriter = staticmethod(error_response)
    only_with = b""
    """The header, in lower case, without which a request is not for this route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self.only_with and all(name != self.only_with for name, _ in scope["headers"]):
            return Match.NONE, {}
        return super().matches(scope)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except InvalidRequest as error:
                return answer_error(error, self.write_error)
            except ClientDisconnected:
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return guarded


def api_router(*, errors: ErrorWriter = error_response, only_with: str = "", **kwargs: Any) -> APIRouter:
    """An APIRouter whose routes are guarded; `kwargs` are APIRouter's.

    With `only_with` they are for requests with this header, and go before what others have at the same paths: two APIs
    may share a path where one of them has its clients name themselves so.

    `errors` writes every error at these paths and below them, also those that no route has to do with: of keys, limits,
    unknown paths, and our own.
    """

    class Route(GuardedRoute):
        write_error = staticmethod(errors)

    Route.only_with = only_with.lower().encode()
    return APIRouter(route_class=Route, **kwargs)


class ErrorFormats:
    """Which API's error format holds at a path: that of the route there, or of the nearest one above."""

    def __init__(self) -> None:
        self._writers: dict[str, ErrorWriter] = {}

    def add(self, routes: Iterable[object]) -> None:
        """Learn the formats of routes."""
        for route in routes:
            if isinstance(route, GuardedRoute) and not route.only_with:
                self._writers[route.path.rstrip("/")] = route.write_error

    def at(self, path: str) -> ErrorWriter:
        """What writes an error at a path."""
        path = path.rstrip("/")
        while path:
            if path in self._writers:
                return self._writers[path]
            path = path.rpartition("/")[0]
        return error_response


MAX_ENTRIES = 10_000
"""Most entries of an object of a request whose values have a type, such as `logit_bias`."""


def _bounded(node: Any) -> Any:
    """A core schema in which neither lists nor objects collect errors without end."""
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


def _few_entries(value: Any) -> Any:
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
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


def principal_of(request: Request) -> str:
    """The name of the API key that a request brings, which tells nothing of the key itself: for routes that keep what
    no other key may read or change. "" on a server without keys.
    """
    return str(request.scope.get("state", {}).get(ASKED_BY, ""))


async def parse_body(request: Request, model: type[M]) -> M:
    """The request's JSON body. Raises InvalidRequest (400) for anything else, naming the first field that is wrong, and
    ClientDisconnected where the client leaves before it has sent all of it.

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
    turn = request.scope.get("extensions", {}).get(PARSE_TURN, contextlib.nullcontext)
    async with turn() as parsed:
        body = await asyncio.to_thread(validate_body, data, model)
        if parsed is not None:
            parsed(await asyncio.to_thread(memory_of, body))
        return body


def validate_body(data: bytes | bytearray, model: type[M]) -> M:
    """`parse_body` of bytes."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        if not any(map(_is_whole, error.errors(include_url=False))):
            raise _invalid(error, data=data) from None
    try:
        # Both are pydantic's own, which have NaN and infinity as its parser does.
        whole = to_json(_with_integers(from_json(data)), inf_nan_mode="constants")
        return model.model_validate_json(whole)
    except ValidationError as error:
        raise _invalid(error) from None


def validate_part(data: Mapping[str, Any], model: type[M], field: str) -> M:
    """A nested object of a body that has been parsed already; errors name it as ``<field>.<name>``."""
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


def _with_integers(value: Any) -> Any:
    """A JSON value in which whole numbers are integers, as far as floats are exact."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= 2**53 else value
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    return [_with_integers(one) for one in value] if isinstance(value, list) else value


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


def example_of(route: object) -> dict[str, Any] | None:
    """The example that `body_docs` gave a route, if any."""
    extra = getattr(route, "openapi_extra", None) or {}
    content = extra.get("requestBody", {}).get("content", {})
    example = content.get("application/json", {}).get("example")
    return dict(example) if isinstance(example, Mapping) else None


@functools.cache
def _schema_of(model: type[BaseModel], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    """A model's schema without references; to be read only."""
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


async def disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result. When the client leaves first, `work` is cancelled and ClientDisconnected raised.

    Read the body before calling this: it takes over the connection's incoming messages.
    """
    task = asyncio.ensure_future(work)
    await race(task, disconnect(request.receive))
    if task.cancelled():
        raise ClientDisconnected
    try:
        return task.result()
    finally:
        # Its exception knows this frame and all above, and so would keep itself and a whole request alive.
        del task


async def race(main: asyncio.Future[Any], other: Coroutine[Any, Any, None]) -> None:
    """Wait for either; afterwards both have ended, the slower one by cancellation."""
    watcher = asyncio.ensure_future(other)
    try:
        await asyncio.wait({main, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (main, watcher):
            task.cancel()
        await asyncio.wait({main, watcher})
        if not watcher.cancelled():
            watcher.exception()


Level = Literal["public", "user", "admin"]

# Coroutines, because FastAPI calls plain functions in a thread.


async def _public() -> None:
    """Marks a route that needs no key."""


async def _user() -> None:
    """Marks a route that needs the API key, or the admin key, where one is set."""


async def _admin() -> None:
    """Marks a route that needs the admin key, where a key is set."""


PUBLIC, USER, ADMIN = Depends(_public), Depends(_user), Depends(_admin)
"""Levels of routes: ``router.post("/flush", dependencies=[ADMIN])``, or ``api_router(dependencies=[USER])`` for those
that say nothing themselves (the last one counts). The server enforces them; a route without any is for admins."""

_LEVELS: dict[Any, Level] = {_public: "public", _user: "user", _admin: "admin"}


async def _large() -> None:
    """Marks a route that takes large bodies."""


LARGE = Depends(_large)
"""Declares, like a level, that a route takes bodies up to `server.max_body_bytes`: prompts. Others take 1 MiB."""


def is_admin(request: Request) -> bool:
    """Whether a request may have what is for admins: it brings the admin key, or the server has no keys. For routes
    that tell users less.
    """
    keys = getattr(request.app.state, "keys", None)
    return keys is None or keys.refusal("admin", dict(request.scope["headers"])) is None


def level_of(route: object) -> Level | None:
    """The level that a route declares; None where it declares none."""
    found = [_LEVELS.get(one.dependency) for one in getattr(route, "dependencies", None) or ()]
    return next((level for level in reversed(found) if level is not None), None)


def takes_large(route: object) -> bool:
    """Whether a route declares LARGE."""
    return any(one.dependency is _large for one in getattr(route, "dependencies", None) or ())


DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event with JSON data, and a name where the API gives its events names."""
    head = f"event: {name}\ndata: " if name else "data: "
    return head.encode() + msgspec.json.encode(data) + b"\n\n"


def error_event(error: InvalidRequest) -> bytes:
    """An error in the middle of a stream, in the format that most share."""
    return event(error_body(error.message, status=error.status, param=error.param, code=error.code))


class EventStream(Response):
    """Sends events as they come, then `done`. Make it only once the request has been accepted.

    An error in the middle becomes what `error` makes of it, before the end. When the client leaves, `events` is closed
    at once. `close` runs in every case, once: abort there what has not finished.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        error: Callable[[InvalidRequest], bytes] = error_event,
        done: bytes = DONE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._error = error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            await race(sending, disconnect(receive))
        finally:
            await self._close()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._guarded()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._events) as frames:
                async for frame in frames:
                    yield frame
        except Exception as error:
            yield self._failed(error)

    def _failed(self, error: Exception) -> bytes:
        """The event of an exception on the way."""
        if isinstance(error, InvalidRequest):
            return self._error(error)
        logger.error("a stream failed", exc_info=error)
        return self._error(InvalidRequest("internal error", status=500, code="internal_error"))
