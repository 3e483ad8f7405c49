"""Long texts wait for one thread: the shorter ones first, each in the end, and no more of them than it can do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.text import encoding
from pegboard.toolkit.text.encoding import LONG_CHARS, MOST_WAITING, LongLane, encode

PATIENCE = 30.0
LONGEST = 2_796_202
"""What the default budget takes."""


class Busy:
    """A lane whose thread is held up, and the order in which its work was done afterwards."""

    def __init__(self) -> None:
        self.lane = LongLane()
        self.done: list[str] = []
        self._gate = threading.Event()
        self._started = threading.Event()
        self.lane.submit(LONG_CHARS, self._wait)
        assert self._started.wait(PATIENCE)

    def _wait(self) -> list[int]:
        self._started.set()
        self._gate.wait(PATIENCE)
        return []

    def add(self, name: str, length: int) -> Future[list[int]]:
        return self.lane.submit(length, self._work(name))

    def _work(self, name: str) -> Callable[[], list[int]]:
        def work() -> list[int]:
            self.done.append(name)
            return []

        return work

    def finish(self, *futures: Future[list[int]]) -> list[str]:
        self._gate.set()
        for one in futures:
            one.result(PATIENCE)
        return self.done


@pytest.fixture
def busy() -> Iterator[Busy]:
    one = Busy()
    yield one
    one.finish()


def test_an_honest_text_passes_very_long_ones(busy: Busy) -> None:
    """Twenty clients send the longest there is, again and again; a prompt of 20,000 tokens is one of the next two."""
    room = MOST_WAITING // LONGEST
    taken = [busy.add(f"long {i}", LONGEST) for i in range(room)]
    for i in range(room, 20):
        with pytest.raises(InvalidRequest, match="try again later") as caught:
            busy.add(f"long {i}", LONGEST)
        assert (caught.value.status, caught.value.code) == (503, "tokenizer_busy")
    honest = busy.add("honest", 80_000)
    assert busy.finish(*taken, honest).index("honest") <= 1


def test_each_has_its_turn(busy: Busy) -> None:
    """However many shorter ones there are."""
    futures = [busy.add("long", LONGEST), *(busy.add(f"{i}", 80_000) for i in range(100))]
    done = busy.finish(*futures)
    assert done.index("long") <= 4
    assert [one for one in done if one != "long"] == [f"{i}" for i in range(100)]


def test_one_of_any_length_is_taken(busy: Busy) -> None:
    only = busy.add("only", 2 * MOST_WAITING)
    with pytest.raises(InvalidRequest, match="try again later"):
        busy.add("another", 2 * MOST_WAITING)
    assert busy.finish(only) == ["only"]


def test_who_has_gone_keeps_no_place(busy: Busy) -> None:
    gone = [busy.add("gone", LONGEST) for _ in range(MOST_WAITING // LONGEST)]
    for one in gone:
        assert one.cancel()
    assert busy.finish(busy.add("next", LONGEST)) == ["next"]


def test_what_fails_fails_alone(busy: Busy) -> None:
    def fail() -> list[int]:
        raise ValueError("no text")

    failing, good = busy.lane.submit(LONG_CHARS, fail), busy.add("good", LONG_CHARS)
    assert busy.finish(good) == ["good"]
    with pytest.raises(ValueError, match="no text"):
        failing.result(PATIENCE)


def test_a_task_that_is_cancelled_gives_its_place_up(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_long", busy.lane)

    async def scene() -> None:
        task = asyncio.ensure_future(encode(FakeTokenizer(), "a" * (LONG_CHARS + 1)))
        await asyncio.sleep(0)
        assert len(busy.lane._waiting) == 1
        task.cancel()
        await asyncio.wait([task])
        assert busy.lane._waiting == []

    asyncio.run(scene())
