"""For output parsers: reading text that arrives in pieces as if it were complete.

A parser is written as a generator that reads from a `Source` and tells a `Sink`; it is suspended wherever the text
ends, and goes on with the next piece. So it cannot tell how the text was cut, and no part of the text is looked at
twice::

    class Shouting(TextStream):
        def run(self) -> Reading[None]:
            while (yield from self.content("<shout>")):
                ...
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

T = TypeVar("T")
Reading = Generator[None, None, T]
"""What reads: it yields where it needs more text, and returns what it read."""


class Broken(Exception):
    """The text is not what was expected. The reader stands before the first character that does not fit."""


class Source:
    """Text as far as it has come. Every method that may need more of it is a generator.

    While it is recorded, what is read is kept, for the case that it has to be taken back.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Add a piece."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, count: int) -> str:
        """Read the next characters, which must be there."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        if self._record is not None:
            self._record.append(piece)
        return piece

    def put_back(self, piece: str) -> None:
        """Take back the last `take`."""
        self.at -= len(piece)

    def unread(self, text: str) -> None:
        """Take back text that was read last, in however many pieces. It must not have been recorded."""
        self.text = text + self.text[self.at :]
        self.at = 0

    def start_record(self, *read: str) -> None:
        """Record from here on; `read` has been read just before."""
        self._record = list(read)

    @property
    def mark(self) -> int:
        """Where the record is now, for `recorded`."""
        return len(self._record or ())

    def recorded(self, mark: int = 0) -> str:
        """Return what has been recorded since a mark."""
        return "".join((self._record or ())[mark:])

    def stop_record(self) -> str:
        """Return what was recorded, "" for nothing."""
        text, self._record = self.recorded(), None
        return text

    def peek(self) -> Reading[str]:
        """Read the next character, "" at the end of the text."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def expect(self, char: str) -> Reading[None]:
        """Read this character. Raises Broken where another one stands."""
        if (yield from self.peek()) != char:
            raise Broken
        self.take(1)

    def starts_with(self, *markers: str) -> Reading[bool]:
        """Return whether the text goes on with one of `markers`; nothing is read."""
        for marker in markers:
            while len(self.text) - self.at < len(marker) and not self.ended and marker.startswith(self.text[self.at :]):
                yield
            if self.text.startswith(marker, self.at):
                return True
        return False

    def read_marker(self, marker: str) -> Reading[bool]:
        """Read `marker` if the text goes on with it."""
        if not (yield from self.starts_with(marker)):
            return False
        self.take(len(marker))
        return True

    def run_of(self, pattern: re.Pattern[str]) -> str:
        """Return the characters, of those that are there, that match a pattern for runs of single characters."""
        found = pattern.match(self.text, self.at)
        return self.take(found.end() - self.at) if found is not None else ""

    def read_run(self, pattern: re.Pattern[str], most: int | None = None) -> Reading[str]:
        """Return all characters that match; about `most` of them where there are more, and more than `most`."""
        pieces: list[str] = []
        length = 0
        while (yield from self.peek()):
            piece = self.run_of(pattern)
            pieces.append(piece)
            length += len(piece)
            if self.at < len(self.text) or (most is not None and length > most):
                break
        return "".join(pieces)

    def skip_space(self) -> Reading[str]:
        """White space, which is returned."""
        return (yield from self.read_run(_SPACE))


_SPACE = re.compile(r"\s*")


@lru_cache(maxsize=256)
def _finder(markers: tuple[str, ...]) -> re.Pattern[str]:
    # The longest of those that begin alike.
    return re.compile("|".join(re.escape(one) for one in sorted(markers, key=len, reverse=True)))


def held_length(text: str, at: int, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text[at:]`` with which some marker begins, all of it not being there."""
    longest = min(len(text) - at, max(map(len, markers)) - 1)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


class Sink:
    """Events of one answer, put together as far as they belong together.

    White space around calls is left out: before one always, after one where nothing else follows or nothing was said
    before.
    """

    def __init__(self) -> None:
        self._events: list[tuple[type[Any], int, list[str]]] = []
        self._space: list[str] = []
        self._said = False
        self.calls = 0
        """Calls that have been told of."""
        self._after_call = False
        self.in_call = False
        """Whether a call has been told of that is not complete."""

    def content(self, text: str) -> None:
        """Text for the user."""
        end = len(text.rstrip())
        if end:
            body = "".join(self._space) + text[:end]
            self._space.clear()
            self._add(Content, 0, body.lstrip() if self._after_call and not self._said else body)
            self._said = True
            self._after_call = False
        if end < len(text):
            self._space.append(text[end:])

    def line(self, text: str) -> None:
        """Text for the user on a line of its own, if there is other text before it."""
        self.content(f"\n{text}" if self._said else text)

    def drop_space(self) -> None:
        """Leave out the white space at the end of the content so far."""
        self._space.clear()

    def reasoning(self, text: str) -> None:
        """Text of the model's thinking."""
        self._add(Reasoning, 0, text)

    def start(self, name: str, call_id: str = "") -> None:
        """Begin a call, with the id that the model wrote, if any."""
        self._space.clear()
        self._events.append((ToolCallStart, self.calls, [name, call_id]))
        self.calls += 1
        self._after_call = True
        self.in_call = True

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        self._add(ToolCallArguments, self.calls - 1, text)

    def end(self) -> None:
        """End the call, which is complete."""
        self.in_call = False

    def take(self, *, last: bool = False) -> list[OutputEvent]:
        """Return what was told since the last time."""
        if last and not self._after_call:
            self._add(Content, 0, "".join(self._space))
            self._space.clear()
        events = [_event(kind, index, pieces) for kind, index, pieces in self._events]
        self._events.clear()
        return events

    def _add(self, kind: type[Any], index: int, text: str) -> None:
        if not text:
            return
        if self._events and self._events[-1][:2] == (kind, index):
            self._events[-1][2].append(text)
        else:
            self._events.append((kind, index, [text]))


def _event(kind: type[Any], index: int, pieces: Sequence[str]) -> OutputEvent:
    if kind is ToolCallStart:
        return ToolCallStart(index, *pieces)
    text = "".join(pieces)
    event: OutputEvent = kind(text) if kind in (Content, Reasoning) else kind(index, text)
    return event


class TextStream(ParserStream):
    """The base of streams: `run` reads `self.source` to its end and tells `self.sink`.

    It may raise Broken: what was recorded then becomes content, and so does the rest of the text.
    """

    def __init__(self) -> None:
        self.source = Source()
        self.sink = Sink()
        self._reading: Reading[None] | None = None

    @abc.abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole text."""

    def feed(self, text: str) -> list[OutputEvent]:
        if text:
            self.source.push(text)
            self._go_on()
        return self.sink.take()

    def finish(self) -> list[OutputEvent]:
        self.source.ended = True
        self._go_on()
        return self.sink.take(last=True)

    def _go_on(self) -> None:
        if self._reading is None:
            self._reading = self._whole()
        next(self._reading, None)

    def _whole(self) -> Reading[None]:
        try:
            yield from self.run()
        except Broken:
            self.give_back()
        while (yield from self.content()):
            pass

    def give_back(self) -> None:
        """Make content of what was recorded."""
        self.sink.content(self.source.stop_record())

    def content(self, *markers: str) -> Reading[str]:
        """Content up to the first of `markers`, which is read and returned; "" where the text ends before one comes.
        The marker is recorded.
        """
        return (yield from self.until(self.sink.content, *markers))

    def until(self, tell: Callable[[str], None], *markers: str) -> Reading[str]:
        """As `content`, but say where the text goes."""
        source = self.source
        while (yield from source.peek()):
            if not markers:
                tell(source.take(len(source.text) - source.at))
                continue
            found = _finder(markers).search(source.text, source.at)
            if found is not None:
                if found.start() > source.at:
                    tell(source.take(found.start() - source.at))
                source.start_record(source.take(len(found.group())))
                return found.group()
            held = held_length(source.text, source.at, markers)
            if len(source.text) - source.at > held:
                tell(source.take(len(source.text) - source.at - held))
            if held:
                if source.ended:
                    tell(source.take(held))
                else:
                    yield
        return ""
