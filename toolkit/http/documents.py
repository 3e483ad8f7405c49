"""The OpenAPI document, and a page that shows it and loads nothing from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.openapi.utils import get_openapi

from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.levels import PUBLIC, USER, Level, level_of
from pegboard.toolkit.http.openapi import ERROR_SCHEMA, ErrorAnswer, error_responses
from pegboard.toolkit.http.pages import html_page
from pegboard.toolkit.http.route_table import UNDECLARED, flat
from pegboard.toolkit.http.routing import api_router

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI
    from starlette.routing import BaseRoute

ABOUT = """\
Where the server has keys, send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`. `x-pegboard-level` says who
may use a route: `public` needs no key, `user` an API key, `admin` the admin key. Every answer has an `x-request-id`.
"""
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_KEYS_ERRORS = (401, 403)


class Documents:
    """/openapi.json and /docs, whatever APIs there are."""

    def routes(self) -> APIRouter:
        router = api_router(include_in_schema=False)
        # Not public: it tells of every plugin.
        router.get("/openapi.json", summary="This server's routes", dependencies=[USER])(self.openapi)
        router.get("/docs", summary="This server's routes, to look at", dependencies=[PUBLIC])(self.page)
        return router

    async def openapi(self, request: Request) -> Response:
        return json_response(request.app.openapi())

    async def page(self) -> Response:
        return _page()


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of all routes that an application has now. What the server itself may answer to a
    route (missing keys, limits, bugs) is added where the router has not said it; so is who may use it.
    """
    if app.openapi_schema is None:
        routes = list(flat(app.routes))
        described = _described(app.routes)
        document = get_openapi(title="Pegboard", version=app.version, description=ABOUT, routes=described)
        levels = {
            (method.lower(), getattr(route, "path_format", "")): level_of(route) or UNDECLARED
            for route in routes
            for method in getattr(route, "methods", None) or ()
        }
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(operation, levels[method, path])
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        model = ErrorAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(model.pop("$defs"), ErrorAnswer=model)
        document["components"]["securitySchemes"] = _SCHEMES
        app.openapi_schema = document
    return app.openapi_schema


def _described(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Without those for requests with a header whose place another one has for all: OpenAPI knows one at each place."""
    for_all = {_place(route) for route in routes if not getattr(route, "only_with", b"")}
    return [route for route in routes if not getattr(route, "only_with", b"") or _place(route) not in for_all]


def _place(route: BaseRoute) -> tuple[str, frozenset[str]]:
    return str(getattr(route, "path", "")), frozenset(getattr(route, "methods", None) or ())


def _complete(operation: dict[str, Any], level: Level) -> None:
    operation["x-pegboard-level"] = level
    operation["security"] = [] if level == "public" else [{name: []} for name in _SCHEMES]
    responses = operation["responses"]
    # FastAPI's own, which our routes never answer with.
    if _ERRORS_OF_FASTAPI in str(responses.get("422")):
        del responses["422"]
    content = responses.get("400", {}).get("content") or {"application/json": {"schema": {"$ref": ERROR_SCHEMA}}}
    statuses = [*(() if level == "public" else _KEYS_ERRORS), *([415] if "requestBody" in operation else [])]
    for status, answer in error_responses(*statuses).items():
        responses.setdefault(str(status), {"description": answer["description"], "content": content})
    operation["responses"] = dict(sorted(responses.items()))


_ERRORS_OF_FASTAPI = "HTTPValidationError"


@functools.cache
def _page() -> Response:
    return html_page((resources.files("pegboard.toolkit.http") / "docs.html").read_text("utf-8"))
