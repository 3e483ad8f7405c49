"""The HTTP application: the routers of the config, one body limit, and errors that are JSON whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem
from pegboard.core.toolkit.http import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    ErrorFormats,
    answer_error,
    example_of,
)
from pegboard.core.version import __version__

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pegboard.core.interfaces.api_router import ApiRouter

logger = logging.getLogger(__name__)


def build_app(routers: Iterable[tuple[str, ApiRouter]], *, max_body_bytes: int) -> FastAPI:
    """The application of named routers, in this order. Raises ConfigError where two claim the same path and method."""
    app = FastAPI(title="Pegboard", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    owners: dict[tuple[str, str], str] = {}
    formats = app.state.errors = ErrorFormats()
    for name, router in routers:
        routes = router.routes()
        _claim(owners, name, routes.routes)
        formats.add(routes.routes)
        app.include_router(routes)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnected, _gone)
    app.add_exception_handler(Exception, _bug)
    return app


def sample_request(routers: Iterable[tuple[str, ApiRouter]]) -> tuple[str, dict[str, Any]] | None:
    """Path and body of the first route that documents an example, to try a new server with."""
    for _, router in routers:
        for route in router.routes().routes:
            example = example_of(route)
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and example is not None:
                return route.path, example
    return None


class BodyLimit:
    """ASGI middleware: refuses larger request bodies with 413, by what they announce and by what arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._max:
            await write_error(scope, self._error())(scope, receive, send)
            return
        arrived = 0

        async def limited() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self._max:
                raise self._error()
            return message

        await self._app(scope, limited, send)

    def _error(self) -> InvalidRequest:
        return InvalidRequest(f"the body exceeds {self._max} bytes", status=413, code="body_too_large")


def _claim(owners: dict[tuple[str, str], str], name: str, routes: Sequence[object]) -> None:
    for route in routes:
        for method in sorted(getattr(route, "methods", None) or ()):
            path = str(getattr(route, "path", ""))
            owner = owners.setdefault((method, path), name)
            if owner != name:
                raise ConfigError(
                    Problem("apis", f"both {owner!r} and {name!r} offer {method} {path}; leave one of them out")
                )


def write_error(scope: Scope, error: InvalidRequest) -> Response:
    """The answer to an error, in the format of the API to which the request's path belongs."""
    formats: ErrorFormats = scope["app"].state.errors
    return answer_error(error, formats.at(scope["path"]))


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return write_error(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), "http_error"
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path}; /openapi.json lists all routes"
        code = "not_found"
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
    response = write_error(request.scope, InvalidRequest(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})
    return response


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1]) if first["loc"] else None
    return write_error(request.scope, InvalidRequest(f"{name}: {first['msg']}", param=name, code="invalid_type"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    # The traceback goes to the log with the exception, which is raised again behind this answer.
    return write_error(request.scope, InvalidRequest("internal error", status=500, code="internal_error"))
