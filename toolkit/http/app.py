"""The HTTP application: the routers of the config behind keys and limits, and errors that are JSON whatever happens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem
from pegboard.core.interfaces.http_front import HttpGuard
from pegboard.toolkit.http.billing import Billing
from pegboard.toolkit.http.documents import Documents, document
from pegboard.toolkit.http.errors import CLIENT_CLOSED_REQUEST, ClientDisconnected
from pegboard.toolkit.http.heads import Heads
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.limits import BodyLimit
from pegboard.toolkit.http.middleware import REQUEST_ID, Front, internal_error, not_found
from pegboard.toolkit.http.openapi import example_of
from pegboard.toolkit.http.route_table import Routes, allowed
from pegboard.toolkit.http.routing import ErrorFormats, GuardedRoute, write_error

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from pegboard.core.interfaces.api_router import ApiRouter


MAX_BODY_BYTES = 16 * 1024 * 1024


class CorsSettings(Protocol):
    """Web pages of other origins that may use the server: the section `server.cors` of a config."""

    @property
    def allow_origins(self) -> tuple[str, ...]: ...
    @property
    def max_age(self) -> int: ...


def build_app(
    routers: Iterable[tuple[str, ApiRouter]],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_text_bytes: int | None = None,
    keys: Keys | None = None,
    guards: Sequence[HttpGuard] = (),
    cors: CorsSettings | None = None,
    access_log: bool = False,
    told: Callable[[str], AbstractContextManager[None] | None] | None = None,
) -> FastAPI:
    """Return the application of named routers, in this order. Raise ConfigError where two claim the same path and
    method.

    `guards` are asked in this order. `told` gives what to put around a router's `routes()`, by its name, so that errors
    name its plugin.
    """
    app = FastAPI(title="Pegboard", version=version("pegboard"), openapi_url=None, redirect_slashes=False)
    named = []
    for name, router in routers:
        with (told(name) if told else None) or nullcontext():
            named.append((name, _routes(router)))
    _add_routes(app, [*named, ("the server", Documents().routes())])
    app.openapi = functools.partial(document, app)  # type: ignore[method-assign]
    app.state.keys = keys = keys or Keys()
    # The last one added is the first to see a request.
    table = Routes()
    app.add_middleware(Heads)
    app.add_middleware(Billing)
    for guard in reversed(guards):
        app.add_middleware(guard.wrap)
    app.add_middleware(BodyLimit, table, max_body_bytes, max_text_bytes)
    refusals = [guard.refuse for guard in guards if type(guard).refuse is not HttpGuard.refuse]
    app.add_middleware(Front, table, keys, refusals=refusals, log=access_log)
    if cors is not None and cors.allow_origins:
        _allow_origins(app, cors)
    app.state.own_middleware = list(app.user_middleware)
    _add_error_handlers(app)
    return app


def _add_routes(app: FastAPI, named: Sequence[tuple[str, APIRouter]]) -> None:
    """Give the application the routes of all routers, and their formats of errors."""
    owners: dict[tuple[str, str], str] = {}
    formats = app.state.errors = ErrorFormats()
    every: list[BaseRoute] = []
    for name, routes in named:
        _claim(owners, name, routes.routes)
        formats.add(routes.routes)
        every += routes.routes
    # Not include_router: FastAPI would look for each request's route twice.
    app.router.routes.extend(sorted(every, key=lambda route: not _only_with(route)))


def _allow_origins(app: FastAPI, cors: CorsSettings) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=cors.allow_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID.decode(), "retry-after"],
        max_age=cors.max_age,
    )


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnected, _gone)
    app.add_exception_handler(Exception, _bug)


def sample_request(routers: Iterable[tuple[str, ApiRouter]]) -> tuple[str, dict[str, object]] | None:
    """Path and body of the first route that documents an example, to try a new server with."""
    for _, router in routers:
        for route in router.routes().routes:
            example = example_of(route)
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and example is not None:
                return route.path, example
    return None


def _routes(router: ApiRouter) -> APIRouter:
    found: object = router.routes()
    if not isinstance(found, APIRouter):
        raise TypeError(f"it returned a {type(found).__name__}, which is not a fastapi.APIRouter")
    return found


def _only_with(route: object) -> str:
    """Return the header without which a request is not for this route, "" where it is for all."""
    return route.only_with.decode() if isinstance(route, GuardedRoute) else ""


def _claim(owners: dict[tuple[str, str], str], name: str, routes: Sequence[object]) -> None:
    for route in routes:
        for method in sorted(getattr(route, "methods", None) or ()):
            path = " with ".join(filter(None, (str(getattr(route, "path", "")), _only_with(route))))
            owner = owners.setdefault((method, path), name)
            if owner != name:
                raise ConfigError(
                    Problem("apis", f"both {owner!r} and {name!r} offer {method} {path}; leave one of them out")
                )


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return write_error(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), "http_error"
    if error.status_code == 404:
        missing = not_found(request.scope)
        message, code = missing.message, missing.code
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
    response = write_error(request.scope, InvalidRequest(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # Of all routes at this path, and not of the first one only.
        response.headers["allow"] = ", ".join(allowed(request.app.router.routes, request.scope))
    return response


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1]) if first["loc"] else None
    return write_error(request.scope, InvalidRequest(f"{name}: {first['msg']}", param=name, code="invalid_type"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    # The traceback goes to the log with the exception, which is raised again after this answer.
    return write_error(request.scope, internal_error())
