"""Routers of API plugins: `api_router`, whose routes answer every error in the API's own shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    ErrorWriter,
    answer_error,
    error_response,
)


class GuardedRoute(APIRoute):
    """A route that answers InvalidRequest with its status, in its API's error format."""

    write_error: ErrorWriter = staticmethod(error_response)
    only_with = b""
    """The header, in lower case, without which a request is not for this route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self.only_with and all(name != self.only_with for name, _ in scope["headers"]):
            return Match.NONE, {}
        return super().matches(scope)

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
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
    """Return an APIRouter whose routes are guarded; `kwargs` are APIRouter's.

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
        """Return what writes an error at a path."""
        path = path.rstrip("/")
        while path:
            if path in self._writers:
                return self._writers[path]
            path = path.rpartition("/")[0]
        return error_response


def write_error(scope: Scope, error: InvalidRequest) -> Response:
    """Return the answer to an error, in the format of the API to which the request's path belongs. The application's
    `state.errors` has the formats.
    """
    formats: ErrorFormats = scope["app"].state.errors
    return answer_error(error, formats.at(scope["path"]))
