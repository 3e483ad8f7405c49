"""How the tests of this folder ask: over HTTP, of a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.router import OpenAIRouter
from pegboard.toolkit.http.app import build_app

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def make_app(client: FakeEngineClient, *, options: dict[str, Any] | None = None, **context: Any) -> Any:
    """The router as the server mounts it."""
    ctx = ApiContext(client=client, max_body_bytes=10**6, **context)
    return build_app([("openai", OpenAIRouter(OpenAIOptions(**(options or {})), ctx))], max_body_bytes=10**6)


def ask(
    method: str, path: str, body: Any = None, *, context: dict[str, Any] | None = None, **settings: Any
) -> tuple[Exchange, FakeEngineClient]:
    """One exchange, and the engine that was asked. `settings` are the engine's, `context` is the router's."""

    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(**settings)
        return await call(make_app(client, **(context or {})), method, path, body), client

    return asyncio.run(scene())


def post(path: str, body: dict[str, Any], **more: Any) -> tuple[Any, FakeEngineClient]:
    """The answer to a request that is served."""
    done, client = ask("POST", path, body, **more)
    assert done.status == 200, done.body
    return done.json(), client


def stream(path: str, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    done, _ = ask("POST", path, {"stream": True, **body}, **more)
    assert done.status == 200, done.body
    *events, last = done.events()
    assert last == "[DONE]"
    return [json.loads(one) for one in events]


def refused(path: str, body: Any, **more: Any) -> dict[str, Any]:
    """The error of a request that is refused with 400, before the engine hears of it."""
    done, client = ask("POST", path, body, **more)
    assert done.status == 400, done.body
    assert client.requests == []
    assert client.embedded == []
    error: dict[str, Any] = done.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "MESSAGES",
    "Exchange",
    "FakeTokenizer",
    "ask",
    "call",
    "make_app",
    "post",
    "refused",
    "stream",
]
