"""A response's stream once more: made of the response and of where its pieces were cut, which is all that is kept."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.plugins.api_openai.responses.events import Event, began, ended, grew, text_of_item
from pegboard.toolkit.http.events import event

_AT_ONCE = 64
"""Events that are written before others get their turn."""
_ENDS = {"failed": "response.failed", "completed": "response.completed"}
_LOST: Event = {
    "type": "error",
    "code": "response_lost",
    "message": "the response ended early: the client that asked for it has left, or it failed",
    "param": None,
}
_AT_FIRST: dict[str, object] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}


@dataclass(slots=True)
class Tape:
    """Where the items of an output were cut: for each, how many characters and log-probabilities its deltas had. And
    the deltas themselves of the one that is open: adding them to a text would copy the text for each.
    """

    chars: list[array[int]] = field(default_factory=list)
    logprobs: list[array[int]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Begin an item."""
        self.chars.append(array("I"))
        self.logprobs.append(array("I"))

    def cut(self, text: str, logprobs: int) -> None:
        """Add a piece to the item that is open."""
        self.chars[-1].append(len(text))
        self.logprobs[-1].append(logprobs)
        self.pieces.append(text)

    def text(self) -> str:
        """Return all pieces of the item that is open, which has them from now on."""
        text = "".join(self.pieces)
        self.pieces.clear()
        return text

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(2 * cuts.itemsize * len(cuts) for cuts in self.chars)


def beginning(response: dict[str, object]) -> list[Event]:
    """Return the first events of a response's stream."""
    first = {**response, **_AT_FIRST}
    return [{"type": kind, "response": first} for kind in ("response.created", "response.in_progress")]


def ending(response: dict[str, Any]) -> Event:
    """Return the last event."""
    return {"type": _ENDS.get(response["status"], "response.incomplete"), "response": response}


def replay(
    response: dict[str, object], items: Sequence[dict[str, object]], tape: Tape, waits: Callable[[], bool]
) -> Iterator[Event | None]:
    """Yield the events of a response's stream; None where there are no more for now, which may be while `waits` says
    that it is still being generated.
    """
    yield from beginning(response)
    index = 0
    while True:
        while index >= len(items) and waits():
            yield None
        if index >= len(items):
            break
        item = items[index]
        yield from began(index, item)
        yield from _pieces(index, item, tape, waits)
        if item["status"] != "in_progress":
            yield from ended(index, item)
        index += 1
    yield _LOST if response["status"] == "in_progress" else ending(response)


def _pieces(index: int, item: dict[str, Any], tape: Tape, waits: Callable[[], bool]) -> Iterator[Event | None]:
    chars, logprobs = tape.chars[index], tape.logprobs[index]
    number = at = entry = 0
    while True:
        while number < len(chars):
            end, last = at + chars[number], entry + logprobs[number]
            entries = item["content"][0]["logprobs"][entry:last] if last > entry else ()
            open_now = tape.pieces and index == len(tape.chars) - 1
            yield grew(index, item, tape.pieces[number] if open_now else text_of_item(item)[at:end], entries)
            number, at, entry = number + 1, end, last
        if item["status"] != "in_progress" or not waits():
            return
        yield None


async def frames(
    events: Iterator[Event | None], after: int, news: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yield the events after the one of number `after`, as they are sent; `news` waits for more."""
    number, ready = 0, []
    for one in events:
        if one is not None:
            if number > after:
                ready.append(event({**one, "sequence_number": number}, one["type"]))
            number += 1
        if ready and (one is None or len(ready) >= _AT_ONCE):
            yield b"".join(ready)
            ready.clear()
            # Until the next turn there may be more, of which no news will come.
            await asyncio.sleep(0)
        elif one is None:
            await news()
        elif number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    if ready:
        yield b"".join(ready)
