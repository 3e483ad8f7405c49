"""All built-in APIs in one application, around an engine that is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from docs._build.config import builtin_registry
from pegboard.conformance.asgi import Application, Exchange
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.http_front import HttpFront
from pegboard.core.registry.hooks import Hooks
from pegboard.core.server.serve import build_api
from pegboard.toolkit.http.openapi import example_of
from pegboard.toolkit.http.route_table import flat

API_KEY, ADMIN_KEY = "the-key-of-users", "the-key-of-admins"
EVERY_API = tuple(record.name for record in builtin_registry().providers("api"))


def whole_app(client: FakeEngineClient | None = None, **server: Any) -> FastAPI:
    """Every API that this distribution has, with these settings of the server. Call it in an event loop."""
    data = {"model": {"path": "x/y"}, "apis": list(EVERY_API), "server": server}
    resolved = compose(data=data, env={}, registry=builtin_registry())
    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    hooks.call.configure(config=resolved.engine, origins=resolved.origins)
    # Under any name: it listens nowhere.
    guards = hooks.call.guard_http(front=HttpFront(None, keyed=True))  # type: ignore[arg-type]
    return build_api(resolved, client or FakeEngineClient(), hooks, guards=guards)[0]


def questions(app: FastAPI) -> Iterator[tuple[str, str, bytes]]:
    """Method, path and a body for every route; its own example where it documents one. Two at one place are one."""
    seen = set()
    for route in flat(app.routes):
        body = json.dumps(example_of(route) or {}).encode()
        for method in sorted(route.methods):
            if (method, route.path) in seen:
                continue
            seen.add((method, route.path))
            yield method, re.sub(r"\{.*?\}", "some", route.path), b"" if method == "GET" else body


async def ask(app: Application, method: str, path: str, body: bytes = b"", **headers: str) -> Exchange:
    """One exchange with these headers (``x_api_key="..."``)."""

    async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await app({**scope, "headers": [*scope["headers"], *more]}, receive, send)

    return await Exchange(with_headers, method, path, body).end()


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}
