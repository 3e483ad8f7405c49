"""Scenes with the engine client and a wire whose other end is the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk, OutputStream
from pegboard.core.interfaces.messages import Accepted, FromScheduler, TokenOutput, TokenOutputs, ToScheduler
from pegboard.core.server.client import AsyncEngineClient
from pegboard.toolkit.system.wire import decode_from_scheduler, encode
from tests.features import FEATURES

END = {"type": "length"}


class Wire:
    """The API's end of a wire, as the client uses it."""

    def __init__(self) -> None:
        self.sent: list[ToScheduler] = []
        self._incoming: asyncio.Queue[list[FromScheduler]] = asyncio.Queue()

    def send(self, messages: Iterable[ToScheduler]) -> None:
        messages = list(messages)
        for message in messages:
            encode(message)
        self.sent.extend(messages)

    async def receive(self) -> list[FromScheduler]:
        got = await self._incoming.get()
        if not got:
            decode_from_scheduler(b"nonsense")
        return got

    async def rave(self) -> None:
        self._incoming.put_nowait([])
        await settle()

    async def say(self, *messages: FromScheduler) -> None:
        """Let the client read these, and act on them."""
        self._incoming.put_nowait(list(messages))
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def tokens(rid: str, text: str, finish: dict[str, Any] | None = None) -> TokenOutputs:
    return TokenOutputs(outputs=[TokenOutput(rid=rid, token_ids=[ord(c) for c in text], finish_reason=finish)])


Scene = Callable[[AsyncEngineClient, Wire], Awaitable[None]]


def play(scene: Scene, salts: Mapping[str, str] | None = None, **settings: Any) -> None:
    async def whole() -> None:
        info = FakeEngineClient().info
        client = AsyncEngineClient(
            info, FakeTokenizer(), {"api_key": "hidden", "port": 1, **settings}, salts=salts, features=FEATURES
        )
        wire = Wire()
        client.attach(wire, info)  # type: ignore[arg-type]
        await scene(client, wire)
        client.detach("the test is over")

    asyncio.run(asyncio.wait_for(whole(), 30))


async def submit(client: AsyncEngineClient, wire: Wire, rid: str = "r", **more: Any) -> OutputStream:
    task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid=rid, **more)))
    await settle()
    await wire.say(Accepted(rid=rid))
    return await task


async def read(stream: OutputStream) -> list[OutputChunk]:
    return [chunk async for chunk in stream]
