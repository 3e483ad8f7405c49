"""/v1/models, which OpenAI's and Anthropic's clients share."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.router import AnthropicRouter
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.router import OpenAIRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys

VERSION = {"anthropic-version": "2023-06-01"}
NAMES = ["one", "org/two", "three"]


def app(*apis: str, keys: Keys | None = None) -> FastAPI:
    client = FakeEngineClient()
    client._info = dataclasses.replace(client.info, served_name=NAMES[0], other_names=NAMES[1:], created=86_400)
    ctx = ApiContext(client=client, max_body_bytes=10_000)
    made = {
        "openai": lambda: OpenAIRouter(OpenAIOptions(), ctx),  # type: ignore[call-arg]
        "anthropic": lambda: AnthropicRouter(AnthropicOptions(), ctx),
    }
    return build_app([(name, made[name]()) for name in apis], keys=keys)  # type: ignore[misc]


def get(path: str, *apis: str, headers: dict[str, str] = VERSION, keys: Keys | None = None) -> httpx.Response:
    async def scene() -> httpx.Response:
        transport = httpx.ASGITransport(app(*(apis or ("openai", "anthropic")), keys=keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(scene())


@pytest.mark.parametrize("apis", [("openai", "anthropic"), ("anthropic", "openai"), ("anthropic",)])
def test_each_ones_clients_get_their_own_fields(apis: tuple[str, ...]) -> None:
    page = get("/v1/models", *apis).json()
    assert [one["id"] for one in page["data"]] == NAMES
    assert {"type": "model", "display_name": "one", "created_at": "1970-01-02T00:00:00Z"}.items() <= page["data"][
        0
    ].items()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("one", "three", False)
    assert get("/v1/models/org/two", *apis).json()["id"] == "org/two"
    missing = get("/v1/models/four", *apis)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    theirs = get("/v1/models", *apis, headers={})
    if "openai" in apis:
        assert theirs.json()["object"] == "list"
        assert get("/v1/models/four", *apis, headers={}).json()["error"]["param"] == "model"
    else:
        assert theirs.status_code == 404


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("limit=2", NAMES[:2], True),
        ("after_id=one", NAMES[1:], False),
        ("after_id=one&limit=1", NAMES[1:2], True),
        ("before_id=three&limit=1", NAMES[1:2], True),
        ("before_id=one", [], False),
        ("lifecycle=retired", [], False),
        ("lifecycle=retired&lifecycle=active", NAMES, False),
    ],
)
def test_pages(query: str, names: list[str], more: bool) -> None:
    page = get(f"/v1/models?{query}").json()
    assert [one["id"] for one in page["data"]] == names
    assert page["has_more"] is more
    assert page["last_id"] == (names[-1] if names else None)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=%C2%B2", "after_id=four", "before_id="])
def test_wrong_pages_are_named(query: str) -> None:
    refused = get(f"/v1/models?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["details"]["param"] == query.partition("=")[0]


def test_keys_hold_with_and_without_the_header() -> None:
    keys = Keys(user=["secret"])
    for more in (VERSION, {}):
        assert get("/v1/models", headers=more, keys=keys).status_code == 401
        assert get("/v1/models", headers={**more, "x-api-key": "secret"}, keys=keys).status_code == 200


def test_two_apis_may_not_have_the_same_path_with_the_same_header() -> None:
    ctx: Any = ApiContext(client=FakeEngineClient(), max_body_bytes=10_000)
    both = [(name, AnthropicRouter(AnthropicOptions(), ctx)) for name in ("one", "two")]
    with pytest.raises(ConfigError, match="both 'one' and 'two' offer"):
        build_app(both)
