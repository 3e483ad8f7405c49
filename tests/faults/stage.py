"""The API process's client with a wire whose other end is the test: no scheduler, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import Accepted
from pegboard.core.server.client import AsyncEngineClient
from pegboard.toolkit.http.budget import BudgetLimits
from pegboard.toolkit.http.generation import Answers
from tests.features import FEATURES


class Wire:
    """The API's end of a wire; its other end is the test."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._incoming: asyncio.Queue[list[Any]] = asyncio.Queue()

    def send(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self.sent += getattr(message, "requests", [message])

    async def receive(self) -> list[Any]:
        return await self._incoming.get()

    async def say(self, *messages: Any) -> None:
        self._incoming.put_nowait(list(messages))
        for _ in range(10):
            await asyncio.sleep(0)


async def submitted(client: AsyncEngineClient, wire: Wire, *requests: GenerateRequest) -> Answers:
    """Answers of requests that the scheduler has accepted."""
    seen = len(wire.sent)
    task = asyncio.ensure_future(Answers.submit(client, requests))
    while len(wire.sent) < seen + len(requests):
        assert not task.done(), task.exception()
        await asyncio.sleep(0.001)
    await wire.say(*(Accepted(rid=one.rid) for one in wire.sent[seen:]))
    return await task


Scene = Callable[[AsyncEngineClient, Any], Awaitable[None]]


def play(
    scene: Scene, tokenizer: Any = None, limits: BudgetLimits | None = None, info: ModelInfo | None = None
) -> None:
    """Run a scene of a client that is attached to a wire, for at most a minute."""
    model = info or FakeEngineClient().info

    async def whole() -> None:
        client, wire = AsyncEngineClient(model, tokenizer or FakeTokenizer(), limits=limits, features=FEATURES), Wire()
        client.attach(wire, model)  # type: ignore[arg-type]
        await scene(client, wire)
        client.detach("the test is over")

    asyncio.run(asyncio.wait_for(whole(), 60))


def refused(status: int, code: str, *requests: GenerateRequest) -> None:
    """The requests are refused together, and nothing of them has been built or sent."""

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await client.submit_all(requests)
        assert (caught.value.status, caught.value.code) == (status, code), caught.value
        assert json.dumps(caught.value.message)
        assert wire.sent == []
        assert not client.pending.streams

    play(scene)
