"""The page on OpenAI's API: its routes are all there are, its config and its example work."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import yaml
from fastapi.routing import APIRoute

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.router import OpenAIRouter
from tests.docs.test_docs import blocks
from tests.plugins.api_openai.asking import make_app

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text("utf-8")


def test_the_routes_are_all_there_are() -> None:
    async def routes() -> set[str]:
        router = OpenAIRouter(OpenAIOptions(), ApiContext(client=FakeEngineClient(), max_body_bytes=1000))  # type: ignore[call-arg]
        found = [one for one in router.routes().routes if isinstance(one, APIRoute)]
        return {f"{method} {one.path_format}" for one in found for method in one.methods or ()}

    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", PAGE)) == asyncio.run(routes())


def test_fields_that_are_named_exist() -> None:
    async def document() -> str:
        return json.dumps(make_app(FakeEngineClient()).openapi())

    known = asyncio.run(document())
    table = PAGE.partition("| field |")[2].partition("\n\n")[0]
    fields = re.findall(r"`([\w.]+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    assert len(fields) > 15
    assert not [name for name in fields if f'"{name.rpartition(".")[2]}"' not in known]


def test_the_config_works() -> None:
    config = yaml.safe_load(blocks(PAGE, "yaml")[0])
    resolved = compose(data={"model": {"path": "demo:smollm2-135m-instruct"}, **config}, env={})
    assert [one.use for one in resolved.engine.apis] == ["native", "openai"]


def test_the_example_works() -> None:
    async def status() -> int | None:
        return (
            await call(make_app(FakeEngineClient()), "POST", "/v1/score", json.loads(blocks(PAGE, "json")[0]))
        ).status

    assert asyncio.run(status()) == 200
