"""What the scheduler says reaches those who wait for it, and ids are free when their requests have ended."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from pegboard.core.interfaces.client import GenerateRequest, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    Rejected,
    TokenizedRequest,
    TokenOutput,
)
from pegboard.core.server.client import AsyncEngineClient
from pegboard.toolkit.http.asker import ASKER
from tests.core.server.client_scene import END, Wire, play, read, settle, submit, tokens


def test_rejection_is_raised() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="r")))
        await settle()
        await wire.say(Rejected(rid="r", status=503, code="queue_full", message="later"))
        with pytest.raises(InvalidRequest, match="later") as caught:
            await task
        assert (caught.value.status, caught.value.code) == (503, "queue_full")
        await submit(client, wire, "r")

    play(scene)


def test_outputs_reach_their_streams() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        a, b = await submit(client, wire, "a"), await submit(client, wire, "b")
        reading = asyncio.gather(read(a), read(b))
        await wire.say(tokens("a", "x"), tokens("unknown", "?"), tokens("b", "y"))
        await wire.say(tokens("a", "z", END), tokens("b", "", END))
        first, second = await reading
        assert ("".join(c.text for c in first), "".join(c.text for c in second)) == ("xz", "y")
        assert first[-1].finish_reason == END

    play(scene)


def test_an_id_is_free_when_its_last_output_has_come() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        stream = await submit(client, wire)
        with pytest.raises(InvalidRequest) as caught:
            await client.submit(GenerateRequest(prompt="Hi", rid="r"))
        assert caught.value.code == "duplicate_rid"
        await stream.aclose()
        with pytest.raises(InvalidRequest):
            await client.submit(GenerateRequest(prompt="Hi", rid="r"))
        await wire.say(tokens("r", "late", {"type": "abort"}))
        await submit(client, wire, "r")

    play(scene)


def test_keys_share_no_prefixes_where_each_has_a_salt() -> None:
    """A key's requests share theirs, and their own salts separate them further; without a key there is no salt."""

    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        for asker, salt in (("ann", ""), ("ann", ""), ("ann", "s"), ("bob", ""), ("bob", "s"), ("", ""), ("0", "")):
            ASKER.set(asker)
            task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", cache_salt=salt)))
            await settle()
            task.cancel()
        spaces = [one.namespace for one in wire.sent if isinstance(one, TokenizedRequest)]
        assert spaces[0] == spaces[1] != ""
        assert len(set(spaces)) == 5
        assert spaces[5:] == ["", ""]

    play(scene, salts={"ann": "a" * 64, "bob": "b" * 64})


def test_every_key_has_its_own_ids() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        streams = []
        for asker in ("1", "2"):
            ASKER.set(asker)
            task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="r")))
            await settle()
            await wire.say(Accepted(rid=f"{asker}:r"))
            streams.append(await task)
            with pytest.raises(InvalidRequest, match="'r' is still running"):
                await client.submit(GenerateRequest(prompt="Hi", rid="r"))
        assert [(one.rid, one.name, one.principal) for one in wire.sent] == [("1:r", "r", "1"), ("2:r", "r", "2")]  # type: ignore[union-attr]
        await wire.say(tokens("2:r", "two"))
        chunk = streams[1].take()
        assert (streams[1].rid, chunk and chunk.rid, chunk and chunk.text) == ("r", "r", "two")
        assert streams[0].take() is None
        await streams[0].aclose()
        await settle()
        assert wire.sent[2:] == [AbortRequest(rid="1:r")]
        del wire.sent[:]
        await client.abort("r")
        await settle()
        assert wire.sent == [AbortRequest(rid="2:r")]

    play(scene)


def test_what_cannot_be_delivered_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        good, bad = await submit(client, wire, "good"), await submit(client, wire, "bad")

        def deliver(self: Any, output: TokenOutput) -> None:
            if output.rid == "bad":
                raise KeyError("a bug")
            original(self, output)

        original = type(good).deliver  # type: ignore[attr-defined]
        monkeypatch.setattr(type(good), "deliver", deliver)
        await wire.say(tokens("bad", "x"), tokens("good", "y", END))
        with pytest.raises(InvalidRequest, match="KeyError") as caught:
            await read(bad)
        assert caught.value.status == 500
        assert [chunk.text for chunk in await read(good)] == ["y"]
        assert wire.sent[-1] == AbortRequest(rid="bad")
        await wire.say(tokens("bad", "", {"type": "abort", "status": 499}))
        await submit(client, wire, "bad")

    play(scene)


def test_control_calls() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        flushing = asyncio.ensure_future(client.flush_cache())
        asking = asyncio.ensure_future(client.server_info())
        await settle()
        flush, info = wire.sent
        assert isinstance(flush, ControlRequest)
        assert isinstance(info, ControlRequest)
        await wire.say(
            ControlReply(call_id=info.call_id, ok=True, payload={"n": 1}), ControlReply(call_id=flush.call_id, ok=False)
        )
        assert not await flushing
        answer = await asking
        assert answer["scheduler"] == {"n": 1}
        assert answer["config"] == {"api_key": "***", "port": 1}

    play(scene)


def test_nothing_is_kept_of_a_request() -> None:
    """Finished, failed, rejected, left and cancelled ones alike."""

    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        for _ in range(3):
            await ends(client, wire)
            gc.collect()
            assert not [one for one in gc.get_objects() if issubclass(type(one), OutputStream)]

    async def ends(client: AsyncEngineClient, wire: Wire) -> None:
        finished = await submit(client, wire, "finished")
        await wire.say(tokens("finished", "a", END))
        assert len(await read(finished)) == 1
        failed = await submit(client, wire, "failed")
        await wire.say(tokens("failed", "", {"type": "abort", "status": 500}))
        with pytest.raises(InvalidRequest):
            await read(failed)
        rejected = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="rejected")))
        await settle()
        await wire.say(Rejected(rid="rejected", status=400, code="bad", message="no"))
        with pytest.raises(InvalidRequest):
            await rejected
        left = await submit(client, wire, "left")
        await left.aclose()
        cancelled = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="cancelled")))
        await settle()
        cancelled.cancel()
        for rid in ("left", "cancelled"):
            await wire.say(tokens(rid, "", {"type": "abort", "status": 499}))
        wire.sent.clear()

    play(scene)
