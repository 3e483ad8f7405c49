"""Reading the outputs of a request."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.server.client import AsyncEngineClient
from tests.core.server.client_scene import END, Wire, play, read, settle, submit, tokens


def test_a_slow_reader_gets_one_large_chunk() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        for char in "abcdef":
            await wire.say(tokens("r", char))
        await wire.say(tokens("r", "g", END))
        chunks = await read(stream)
        assert [chunk.text for chunk in chunks] == ["abcdefg"]
        assert len(chunks[0].token_ids) == 7

    play(scene)


def test_closing_aborts_once() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        await stream.aclose()
        await stream.aclose()
        await settle()
        assert wire.sent[1:] == [AbortRequest(rid="r")]

    play(scene)


def test_closing_after_the_end_does_nothing() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        await wire.say(tokens("r", "x", END))
        await read(stream)
        await stream.aclose()
        await settle()
        assert len(wire.sent) == 1

    play(scene)


def test_aborted_by_id_ends_with_a_finish_reason() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        await wire.say(tokens("r", "x", {"type": "abort", "message": "aborted by the client", "status": 499}))
        assert (await read(stream))[-1].finish_reason is not None

    play(scene)


def test_failed_requests_raise() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        await wire.say(tokens("r", "x"), tokens("r", "", {"type": "abort", "message": "broken", "status": 500}))
        chunks = aiter(stream)
        assert (await anext(chunks)).text == "x"
        with pytest.raises(InvalidRequest, match="broken") as caught:
            await anext(chunks)
        assert caught.value.status == 500

    play(scene)


def test_what_failed_says_what_is_to_blame() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        said = {"type": "abort", "message": "no", "status": 422, "code": "because", "param": "params.x"}
        await wire.say(tokens("r", "", said))
        with pytest.raises(InvalidRequest, match="no") as caught:
            await read(stream)
        assert (caught.value.status, caught.value.code, caught.value.param) == (422, "because", "params.x")

    play(scene)


def test_closing_what_has_ended_spares_a_later_request_of_that_name() -> None:
    """A reader may be slow: its request has ended, the name is free and taken again, and only then it closes."""

    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        first = await submit(client, wire, "r")
        await wire.say(tokens("r", "old", END))
        second = await submit(client, wire, "r")
        await first.aclose()
        await settle()
        assert not any(isinstance(message, AbortRequest) for message in wire.sent)
        await wire.say(tokens("r", "new", END))
        assert [chunk.text for chunk in await read(second)] == ["new"]

    play(scene)
