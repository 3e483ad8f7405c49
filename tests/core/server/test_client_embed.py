"""Embeddings by the engine client, against a wire whose other end is the test."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.client import Embedding, EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    TokenOutputs,
)
from pegboard.core.pipeline.points import encoded
from pegboard.core.server.client import AsyncEngineClient
from pegboard.plugins.row_outputs.messages import NAME, Asked, Said
from tests.core.server.client_scene import END, Wire, play, settle


def vector(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def embedded(rid: str, data: bytes, reason: dict[str, Any] | None = None) -> TokenOutputs:
    output = TokenOutput(
        rid=rid,
        token_ids=[],
        finish_reason=reason or END,
        prompt_tokens=2,
        cached_tokens=1,
        features={NAME: encoded(Said(vector=data))},
    )
    return TokenOutputs(outputs=[output])


def ask(client: AsyncEngineClient, *rids: str, **more: Any) -> asyncio.Future[list[Embedding]]:
    return asyncio.ensure_future(client.embed([EmbedRequest(prompt="Hi", rid=rid, **more) for rid in rids]))


def test_answers_come_in_the_order_of_the_requests() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a", "b")
        await settle()
        (message,) = wire.sent
        assert isinstance(message, TokenizedBatch)
        assert all(
            one.features[NAME] == encoded(Asked(embed=True)) and one.sampling.max_new_tokens == 0
            for one in message.requests
        )
        await wire.say(Accepted(rid="a"), Accepted(rid="b"))
        await wire.say(embedded("b", vector(0, 2)))
        assert not task.done()
        await wire.say(embedded("a", vector(3, 4)))
        first, second = await task
        assert first.vector == pytest.approx([0.6, 0.8])
        assert second.vector == [0, 1]
        assert (first.prompt_tokens, first.cached_tokens) == (2, 1)
        assert not any(isinstance(one, AbortRequest) for one in wire.sent)

    play(scene)


def test_as_it_is_or_cut() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        for settings, expected in (
            ({"normalize": False}, [3, 4, 12]),
            ({"dimensions": 2}, [0.6, 0.8]),
            ({"normalize": False, "dimensions": 1}, [3]),
        ):
            task = ask(client, "a", **settings)
            await settle()
            await wire.say(Accepted(rid="a"), embedded("a", vector(3, 4, 12)))
            assert (await task)[0].vector == pytest.approx(expected)

    play(scene)


def test_a_vector_of_zeros_stays_one() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a")
        await settle()
        await wire.say(Accepted(rid="a"), embedded("a", vector(0, 0)))
        assert (await task)[0].vector == [0, 0]

    play(scene)


def test_one_that_fails_aborts_the_others() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a", "b")
        await settle()
        await wire.say(Accepted(rid="a"), Accepted(rid="b"))
        await wire.say(embedded("a", b"", {"type": "abort", "status": 500, "message": "the model failed"}))
        with pytest.raises(InvalidRequest, match="the model failed") as caught:
            await task
        assert caught.value.status == 500
        await settle()
        assert [one.rid for one in wire.sent if isinstance(one, AbortRequest)] == ["b"]

    play(scene)


def test_cancelled_is_aborted() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a")
        await settle()
        await wire.say(Accepted(rid="a"))
        task.cancel()
        await settle()
        assert isinstance(wire.sent[-1], AbortRequest)

    play(scene)


def test_the_engine_goes_away() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a")
        await settle()
        await wire.say(Accepted(rid="a"))
        client.detach("the engine has died")
        with pytest.raises(InvalidRequest, match="has died") as caught:
            await task
        assert caught.value.status == 503

    play(scene)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -3}, "dimensions"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
    ],
)
def test_bad_input(fields: dict[str, Any], param: str) -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await client.embed([EmbedRequest(**{"prompt": "Hi", **fields})])
        assert (caught.value.status, caught.value.param) == (400, param)
        assert not wire.sent

    play(scene)


def test_more_dimensions_than_there_are() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = ask(client, "a", dimensions=3)
        await settle()
        assert isinstance(wire.sent[0], TokenizedRequest)
        await wire.say(Accepted(rid="a"), embedded("a", vector(3, 4)))
        with pytest.raises(InvalidRequest, match="at most 2") as caught:
            await task
        assert caught.value.param == "dimensions"

    play(scene)
