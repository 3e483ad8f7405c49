"""What this API promises beyond what the suite tests."""

import asyncio
import json
from typing import Any

from fastapi import FastAPI
from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces import ApiContext

from pegboard_example_plugin.options import CompletionLinesOptions
from pegboard_example_plugin.router import CompletionLines


async def ask(client: FakeEngineClient, **body: Any) -> Exchange:
    app = FastAPI()
    ctx = ApiContext(client=client, max_body_bytes=100_000)
    app.include_router(CompletionLines(CompletionLinesOptions(max_tokens=7), ctx).routes())
    return await call(app, "POST", "/lines", {"text": "Count!", **body})


def answered(**body: Any) -> tuple[Exchange, FakeEngineClient]:
    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(["One, ", "two."])
        return await ask(client, **body), client

    return asyncio.run(scene())


def test_lines() -> None:
    done, client = answered()
    *pieces, last = [json.loads(one) for one in done.body.splitlines()]
    assert pieces == [{"piece": "One, "}, {"piece": "two."}]
    assert last["tokens"] == 9
    assert last["why"]["type"] == "stop"
    assert client.requests[0].sampling.max_new_tokens == 7


def test_whole() -> None:
    done, client = answered(stream=False, max_tokens=3)
    assert done.json()["text"] == "One, two."
    assert client.requests[0].sampling.max_new_tokens == 3


def test_errors() -> None:
    done, _ = answered(max_tokens="many")
    assert done.status == 400
    assert done.json()["field"] == "max_tokens"
