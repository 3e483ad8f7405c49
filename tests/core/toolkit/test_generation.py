"""Several requests read together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pegboard.core.interfaces.client import GenerateRequest, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.testing.fake_client import SCRIPT, FakeEngineClient
from pegboard.core.toolkit.generation import Answers

TEXT = "".join(SCRIPT)


def requests(*rids: str) -> list[GenerateRequest]:
    return [GenerateRequest(prompt="Hi", rid=rid) for rid in rids]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(asyncio.ensure_future(scene()), 30)

    asyncio.run(whole())


@pytest.mark.parametrize("rids", [("a",), ("a", "b", "c")])
def test_collect(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient()
        answers = await Answers.submit(client, requests(*rids))
        done = await answers.collect()
        assert [(one.rid, one.text, one.completion_tokens) for one in done] == [(rid, TEXT, len(TEXT)) for rid in rids]
        assert client.aborted == []

    play(scene)


def test_chunks_come_as_they_come() -> None:
    async def scene() -> None:
        answers = await Answers.submit(FakeEngineClient(), requests("a", "b"))
        seen = [(index, chunk.text) async for index, chunk in answers.chunks()]
        for index in (0, 1):
            assert [text for i, text in seen if i == index] == list(SCRIPT)

    play(scene)


def test_one_refusal_aborts_the_others() -> None:
    class Picky(FakeEngineClient):
        async def submit(self, request: GenerateRequest) -> OutputStream:
            stream = await super().submit(request)
            if request.rid == "bad":
                raise InvalidRequest("not you")
            return stream

    async def scene() -> None:
        client = Picky()
        with pytest.raises(InvalidRequest, match="not you"):
            await Answers.submit(client, requests("a", "bad", "b"))
        assert sorted(client.aborted) == ["a", "b"]

    play(scene)


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_failure_is_raised_and_aborts_the_rest(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient(fail_at=1)
        answers = await Answers.submit(client, requests(*rids))
        with pytest.raises(InvalidRequest):
            await answers.collect()
        assert set(client.aborted) <= set(rids[1:])
        assert len(asyncio.all_tasks()) == 2, "a pump goes on"

    play(scene)


def test_cancelling_aborts_everything() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        answers = await Answers.submit(client, requests("a", "b"))
        task = asyncio.ensure_future(answers.collect())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.aborted == ["a", "b"]
        assert len(asyncio.all_tasks()) == 2, "a pump goes on"

    play(scene)
