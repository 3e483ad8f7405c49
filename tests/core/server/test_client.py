"""The engine client against a wire whose other end is the test."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.config.redact import redact
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    TokenOutputs,
    ToScheduler,
)
from pegboard.core.server.asker import ASKER
from pegboard.core.server.client import AsyncEngineClient
from pegboard.core.server.wire import decode_from_scheduler, encode
from pegboard.core.toolkit.text.encoding import INLINE_CHARS

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


def play(scene: Scene) -> None:
    async def whole() -> None:
        info = FakeEngineClient().info
        client = AsyncEngineClient(info, FakeTokenizer(), {"api_key": "hidden", "port": 1})
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


def test_submit_waits_for_acceptance() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        task = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="r")))
        await settle()
        assert isinstance(wire.sent[0], TokenizedRequest)
        assert not task.done()
        await wire.say(Accepted(rid="r"))
        assert (await task).rid == "r"

    play(scene)


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


def test_bad_requests_never_leave() -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        with pytest.raises(InvalidRequest):
            await client.submit(GenerateRequest(prompt=""))
        with pytest.raises(InvalidRequest):
            await client.submit(GenerateRequest(prompt="x" * (INLINE_CHARS * 4)))
        assert wire.sent == []

    play(scene)


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
        assert [(one.rid, one.name, one.principal) for one in wire.sent] == [("1:r", "r", "1"), ("2:r", "r", "2")]
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
        await submit(client, second, "r")

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


def test_what_cannot_be_encoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: AsyncEngineClient, wire: Wire) -> None:
        good = asyncio.ensure_future(client.submit(GenerateRequest(prompt="Hi", rid="good")))
        bad = asyncio.ensure_future(client.control("set", {"value": object()}))
        await settle()
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await bad
        await wire.say(Accepted(rid="good"))
        await good
        monkeypatch.setattr("pegboard.core.pipeline.frontend.intake._check_plain", lambda *_: None)
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await client.submit(GenerateRequest(prompt="Hi", rid="huge", params={"n": 2**70}))
        await submit(client, wire, "huge")

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
