"""For chat APIs: calls in a thought whose end the model forgot."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, ParserStream, ToolCallStart
from pegboard.toolkit.parsing.text_stream import held_length

if TYPE_CHECKING:
    from collections.abc import Iterable


class ThoughtCalls:
    """Reads the thinking of an answer, and finds the calls at its end.

    A call in a thought is one that the model thinks about, and so is text, if the thought goes on after it, or ends and
    an answer follows. If the answer is over after the call, the model forgot to end its thought, and means the call.
    Which it is is known at the end, so from such a call on all is held back. `markers` are `OutputParser.call_markers`,
    and `parse` makes a parser of calls, which tells whether text is one.
    """

    def __init__(self, markers: Sequence[str], parse: Callable[[], ParserStream]) -> None:
        self._markers = tuple(markers)
        self._finder = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        self._parse = parse
        self._parser: ParserStream | None = None
        """Reads what is held back; None where that is no more than white space and the beginning of a marker."""
        self._called = False
        self._space = ""
        self._held: list[str] = []
        self._tail = ""

    def feed(self, text: str) -> str:
        """Return thinking that is certain, after the next piece of it."""
        told: list[str] = []
        text = self._tail + text
        at = 0
        for found in self._finder.finditer(text):
            told.append(self._pass(text[at : found.start()]))
            if self._parser is None:
                self._parser = self._parse()
            told.append(self._pass(found.group()))
            at = found.end()
        end = len(text) - held_length(text, at, self._markers)
        told.append(self._pass(text[at:end]))
        self._tail = text[end:]
        return "".join(told)

    def close(self) -> str:
        """Return the thinking that was held back: the thought has ended, and an answer follows."""
        text = self._flush() + self._tail
        self._tail = ""
        return text

    def finish(self) -> tuple[str, str]:
        """Return the thinking and the calls that were held back: the text is over. One of them is ""."""
        tail, self._tail = self._tail, ""
        told = self._pass(tail)
        if self._parser is None:
            return told + self._flush(), ""
        if self._is_prose(self._parser.finish()) or not self._called:
            return self._flush(), ""
        calls = "".join(self._held)
        self._held.clear()
        return "", calls

    def _pass(self, text: str) -> str:
        """Read text in which no marker begins, or a marker. Returns what is certain."""
        if self._parser is not None:
            self._held.append(text)
            if not self._is_prose(self._parser.feed(text)):
                return ""
            text = self._flush()
        else:
            text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        return text[:end]

    def _is_prose(self, events: Iterable[OutputEvent]) -> bool:
        """Return whether other text than a call was told."""
        prose = False
        for event in events:
            self._called = self._called or isinstance(event, ToolCallStart)
            prose = prose or (isinstance(event, Content) and bool(event.text.strip()))
        return prose

    def _flush(self) -> str:
        text = self._space + "".join(self._held)
        self._space, self._parser, self._called = "", None, False
        self._held.clear()
        return text
