"""What is sent: together, or alone where one message cannot be encoded."""

from __future__ import annotations

import asyncio

import pytest

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import Accepted, TokenizedBatch
from pegboard.core.server.client import AsyncEngineClient
from tests.core.server.client_scene import Wire, play, settle, submit


def test_requests_of_one_turn_travel_together() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        tasks = [asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid=f"{i}"))) for i in range(3)]
        await settle()
        assert len(wire.sent) == 1
        assert isinstance(wire.sent[0], TokenizedBatch)
        assert [one.rid for one in wire.sent[0].requests] == ["0", "1", "2"]
        await wire.say(*(Accepted(rid=f"{i}") for i in range(3)))
        await asyncio.gather(*tasks)

    play(scene)


def test_what_cannot_be_encoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        good = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="good")))
        bad = asyncio.ensure_future(client.control("set", {"value": object()}))
        await settle()
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await bad
        await wire.say(Accepted(rid="good"))
        await good
        monkeypatch.setattr("pegboard.core.frontend.intake._check_plain", lambda *_: None)
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await client.submit(GenerateRequest(prompt="Hi", rid="huge", params={"n": 2**70}))
        await submit(client, wire, "huge")

    play(scene)
