"""The engine client against a wire whose other end is the test."""

from __future__ import annotations

import asyncio

import pytest

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
)
from pegboard.core.server.client import AsyncEngineClient
from pegboard.toolkit.system.redact import redact
from pegboard.toolkit.text.encoding import INLINE_CHARS
from tests.core.server.client_scene import END, Wire, play, read, settle, submit, tokens


def test_submit_waits_for_acceptance() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="r")))
        await settle()
        assert isinstance(wire.sent[0], TokenizedRequest)
        assert not task.done()
        await wire.say(Accepted(rid="r"))
        assert (await task).rid == "r"

    play(scene)


def test_bad_requests_never_leave() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        with pytest.raises(InvalidRequest):
            await client.submit(GenerateRequest(prompt=""))
        with pytest.raises(InvalidRequest):
            await client.submit(GenerateRequest(prompt="x" * (INLINE_CHARS * 4)))
        assert wire.sent == []

    play(scene)


def test_cancelled_submit_aborts() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="r")))
        await settle()
        task.cancel()
        await settle()
        assert wire.sent[1:] == [AbortRequest(rid="r")]
        await wire.say(Rejected(rid="r", status=503, code="queue_full", message="later"))
        await submit(client, wire, "r")

    play(scene)


def test_abort_by_id_reaches_the_parts_of_a_batch() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        for rid in ("r_0", "r_1", "r_x", "other"):
            await submit(client, wire, rid)
        del wire.sent[:]
        await client.abort("r")
        await client.abort("nobody")
        await settle()
        assert wire.sent == [AbortRequest(rid="r_0"), AbortRequest(rid="r_1")]
        await client.abort(all_requests=True)
        await settle()
        assert wire.sent[-1] == AbortRequest(all_requests=True)

    play(scene)


def test_detaching_fails_everything_and_attaching_begins_again() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        pending = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="p")))
        calling = asyncio.ensure_future(client.flush_cache())
        await settle()
        client.detach("the engine died")
        assert not client.ready
        for work in (read(stream), pending, calling, client.submit(GenerateRequest(prompt="Hi")), client.flush_cache()):
            with pytest.raises(InvalidRequest) as caught:
                await work
            assert caught.value.status == 503
        second = Wire()
        client.attach(second, client.info)  # type: ignore[arg-type]
        assert client.ready
        await submit(client, second, "r")  # type: ignore[unreachable]

    play(scene)


def test_what_cannot_be_decoded_fails_everything() -> None:
    """Nothing hangs, and the supervisor hears of it."""

    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        pending = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="p")))
        calling = asyncio.ensure_future(client.server_info())
        broken = asyncio.ensure_future(client.broken())
        await settle()
        assert not broken.done()
        await wire.rave()
        assert "cannot use (ValidationError" in await broken
        assert not client.ready
        for work in (read(stream), pending, calling, client.submit(GenerateRequest(prompt="Hi"))):
            with pytest.raises(InvalidRequest) as caught:
                await work
            assert caught.value.status == 503
        client.detach("its process was killed")
        second = Wire()
        client.attach(second, client.info)  # type: ignore[arg-type]
        again = asyncio.ensure_future(client.broken())
        await submit(client, second, "r")
        assert not again.done()
        again.cancel()

    play(scene)


def test_a_batch_is_all_or_nothing() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        def batch(*rids: str, prompt: str = "Hi") -> list[GenerateRequest]:
            return [GenerateRequest(prompt=prompt, rid=rid) for rid in rids]

        with pytest.raises(InvalidRequest):
            await client.submit_all([*batch("a", "b"), GenerateRequest(prompt="")])
        with pytest.raises(InvalidRequest) as caught:
            await client.submit_all(batch("a", "a"))
        assert caught.value.code == "duplicate_rid"
        assert wire.sent == []
        # Long texts are tokenised elsewhere, and travel together nevertheless.
        task = asyncio.ensure_future(client.submit_all(batch("a", "b", "c", prompt="x" * (INLINE_CHARS + 1))))
        while not wire.sent:
            await asyncio.sleep(0.001)
        [message] = wire.sent
        assert isinstance(message, TokenizedBatch)
        await wire.say(Accepted(rid="a"), Rejected(rid="b", status=503, code="queue_full", message="later"))
        with pytest.raises(InvalidRequest, match="later"):
            await task
        await settle()
        assert wire.sent[1:] == [AbortRequest(rid="a"), AbortRequest(rid="c")]
        assert await client.submit_all([]) == []
        await client.drain(0)

    play(scene)


def test_signs_of_life() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        client.ping()
        await settle()
        [ping] = wire.sent
        assert isinstance(ping, ControlRequest)
        heard = client.heard
        await wire.say(ControlReply(call_id=ping.call_id, ok=True))
        assert client.heard == heard + 1
        client.detach("gone")
        client.ping()

    play(scene)


def test_drain_waits_for_running_requests() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        draining = asyncio.ensure_future(client.drain(60))
        await settle()
        assert not client.ready
        with pytest.raises(InvalidRequest) as caught:
            await client.submit(GenerateRequest(prompt="Hi"))
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert not draining.done()
        await wire.say(tokens("r", "x", END))
        await draining
        assert (await read(stream))[-1].finish_reason == END
        assert len(wire.sent) == 1

    play(scene)


def test_drain_waits_for_what_gates_hold() -> None:
    """Another server may be reading the KV of a request that was answered."""

    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        draining = asyncio.ensure_future(client.drain(60))
        for held in (2, 1, 0):
            while not wire.sent:
                await asyncio.sleep(0.01)
            call = wire.sent.pop()
            assert isinstance(call, ControlRequest)
            assert not draining.done()
            await wire.say(ControlReply(call_id=call.call_id, ok=True, payload={"held_requests": held}))
        await draining

    play(scene, gates=[{"use": "holding"}])


def test_drain_waits_for_gates_no_longer_than_it_may() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        await client.drain(0.1)

    play(scene, gates=[{"use": "holding"}])


def test_drain_aborts_what_does_not_end() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        await submit(client, wire)
        draining = asyncio.ensure_future(client.drain(0))
        while AbortRequest(all_requests=True) not in wire.sent:
            await asyncio.sleep(0)
        await wire.say(tokens("r", "", {"type": "abort", "status": 499}))
        await draining

    play(scene)


def test_redaction_spares_what_only_looks_like_a_secret() -> None:
    settings = {"max_total_tokens": 5, "hf_token": "x", "nested": {"api_keys": ["a"], "password": ""}, "keyboard": "k"}
    assert redact(settings) == {
        "max_total_tokens": 5,
        "hf_token": "***",
        "nested": {"api_keys": ["***"], "password": ""},
        "keyboard": "k",
    }
