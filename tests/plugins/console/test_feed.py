"""The stream of events: who asks, what viewers get, and what one costs the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.console.feed import MOST_EVENTS, MOST_VIEWERS, Feed, Viewer

PATIENCE_S = 10


class Scheduler(FakeEngineClient):
    """Answers a look with one step, once it is allowed to. `down` is raised in place of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.down: InvalidRequest | None = None
        self.started: object = 1
        self.number = 0
        self.asked: list[int] = []
        self._allowed = asyncio.Semaphore(0)

    def allow(self) -> None:
        """Let it answer once more."""
        self._allowed.release()

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        assert args is not None
        self.asked.append(args["since"])
        await self._allowed.acquire()
        if self.down is not None:
            raise self.down
        self.number += 1
        return {"started": self.started, "now": 1.0, "stats": {}, "steps": [[self.number, "decode"]]}


class Reader:
    """Reads what a viewer gets, an event at a time."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self._frames = viewer.frames()

    async def next(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next event, its name and its data; None at the end."""
        frame = await asyncio.wait_for(anext(self._frames, None), PATIENCE_S)
        if frame is None:
            return None
        name, data = frame.decode().strip().split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def of(self, wanted: str) -> dict[str, Any]:
        """Return the data of the next event, which has this name."""
        found = await self.next()
        assert found is not None
        assert found[0] == wanted
        return found[1]


def scene(play: Callable[[Scheduler, Feed], Awaitable[None]], *, busy: float = PATIENCE_S) -> None:
    """Play with a scheduler, and a feed that asks again at once."""

    async def played() -> None:
        client = Scheduler()
        await play(client, Feed(client, period=0.0, busy=busy))
        assert len(asyncio.all_tasks()) == 1, "what was begun has ended"

    asyncio.run(played())


def test_nothing_is_asked_without_viewers() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        viewer = feed.open()
        client.allow()
        await Reader(viewer).of("look")
        await feed.close(viewer)
        asked = len(client.asked)
        client.allow()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(client.asked) == asked

    scene(play)


def test_one_question_serves_all_viewers_and_each_step_is_asked_for_once() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        first = Reader(feed.open())
        for number in (1, 2, 3):
            client.allow()
            assert (await first.of("look"))["steps"] == [[number, "decode"]]
        second = Reader(feed.open())
        assert [step[0] for step in (await second.of("steps"))["steps"]] == [1, 2, 3]
        client.allow()
        assert (await first.of("look")) == (await second.of("look"))
        await feed.close(first.viewer)
        client.allow()
        assert (await second.of("look"))["steps"] == [[5, "decode"]]
        await feed.close(second.viewer)
        assert client.asked[:5] == [0, 1, 2, 3, 4]

    scene(play)


def test_a_slow_reader_loses_the_oldest_and_the_others_nothing() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        slow, quick = Reader(feed.open()), Reader(feed.open())
        for number in range(1, MOST_EVENTS + 6):
            client.allow()
            assert (await quick.of("look"))["steps"][0][0] == number
        assert (quick.viewer.dropped, slow.viewer.dropped) == (0, 5)
        assert await slow.of("dropped") == {"dropped": 5}
        for number in range(6, MOST_EVENTS + 6):
            assert (await slow.of("look"))["steps"][0][0] == number
        await feed.close(slow.viewer)
        await feed.close(quick.viewer)

    scene(play)


def test_a_scheduler_that_is_not_there_is_told_and_asked_again() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        reader = Reader(feed.open())
        client.allow()
        await reader.of("look")
        client.down = InvalidRequest("the engine is starting", status=503, code="not_ready")
        client.allow()
        assert await reader.of("state") == {"state": "down", "message": "the engine is starting"}
        client.down, client.started, client.number = None, 2, 7
        for _ in range(2):
            client.allow()
            assert (await reader.of("look"))["started"] == 2
        assert client.asked[:4] == [0, 1, 1, 8]
        await feed.close(reader.viewer)

    scene(play)


def test_steps_of_a_scheduler_that_is_gone_are_forgotten() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        first = Reader(feed.open())
        for started, number in ((1, 5), (2, 0)):
            client.started, client.number = started, number
            client.allow()
            await first.of("look")
        second = Reader(feed.open())
        assert (await second.of("steps"))["steps"] == [[1, "decode"]]
        await feed.close(first.viewer)
        await feed.close(second.viewer)

    scene(play)


def test_a_scheduler_that_does_not_answer_is_told_and_not_asked_twice() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        reader = Reader(feed.open())
        assert (await reader.of("state"))["state"] == "busy"
        assert len(client.asked) == 1
        await feed.close(reader.viewer)

    scene(play, busy=0.001)


def test_a_server_that_stops_ends_its_streams() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        reader = Reader(feed.open())
        client.is_ready = False
        client.allow()
        assert (await reader.of("state"))["state"] == "stopping"
        assert await reader.next() is None
        await feed.close(reader.viewer)

    scene(play)


def test_a_fault_of_its_own_ends_the_streams_and_the_next_one_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        client.started = "yesterday"
        reader = Reader(feed.open())
        client.allow()
        assert await reader.next() is None
        await feed.close(reader.viewer)
        client.started = 1
        again = Reader(feed.open())
        client.allow()
        await again.of("look")
        await feed.close(again.viewer)

    scene(play)
    assert "questions have ended" in caplog.text


def test_a_viewer_that_comes_while_the_last_one_leaves_is_told_all() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        first = feed.open()
        await asyncio.sleep(0)
        leaving = asyncio.create_task(feed.close(first))
        await asyncio.sleep(0)
        second = Reader(feed.open())
        await leaving
        for _ in range(2):
            client.allow()
            await second.of("look")
        await feed.close(second.viewer)

    scene(play)


def test_viewers_are_bounded() -> None:
    async def play(client: Scheduler, feed: Feed) -> None:
        viewers = [feed.open() for _ in range(MOST_VIEWERS)]
        with pytest.raises(InvalidRequest) as refused:
            feed.open()
        assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")
        await feed.close(viewers.pop())
        viewers.append(feed.open())
        for viewer in viewers:
            await feed.close(viewer)

    scene(play)
