"""For chat APIs: answers that are either calls or follow another format, such as JSON of a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, ParserStream, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable


class CallOrStream(ParserStream):
    """Lets the beginning of an answer say what it is: the text of calls goes to a parser of calls, any other is content
    from its first character to its last, whatever stands in its strings.

    `openings` are `OutputParser.openings`. Where JSON may begin in the same way, the whole answer says what it is:
    calls if it is nothing else. Then calls are told when it has ended, and not before.
    """

    def __init__(self, calls: ParserStream, openings: Sequence[str]) -> None:
        self._calls = calls
        self._left = ["".join(one.split()) for one in openings]
        """Openings that what has come so far is the beginning of, without white space."""
        self._seen = 0
        self._held: list[str] = []
        self._pass: Callable[[str], list[OutputEvent]] | None = None
        self._kept = False

    def feed(self, text: str) -> list[OutputEvent]:
        if self._pass is not None:
            return self._pass(text) if text else []
        for at, char in enumerate(text):
            if char.isspace():
                continue
            self._left = [one for one in self._left if one[self._seen] == char]
            self._seen += 1
            if not self._left:
                self._pass = _content
                return self._give(text)
            found = next((one for one in self._left if len(one) == self._seen), None)
            if found is not None:
                self._kept = _may_be_json(found)
                self._pass = self._keep if self._kept else self._calls.feed
                return self._give(text[: at + 1]) + self.feed(text[at + 1 :])
        self._held.append(text)
        return []

    def finish(self) -> list[OutputEvent]:
        if self._pass is None:
            self._pass = _content
            return self._give("")
        if self._pass is _content:
            return []
        if not self._kept:
            return self._calls.finish()
        whole = "".join(self._held)
        events = self._calls.feed(whole) + self._calls.finish()
        alone = not any(isinstance(one, Content) and one.text.strip() for one in events)
        return events if alone and any(isinstance(one, ToolCallStart) for one in events) else _content(whole)

    def _give(self, text: str) -> list[OutputEvent]:
        """Send what was held back, and this, to where it belongs."""
        assert self._pass is not None
        whole = "".join(self._held) + text
        self._held.clear()
        return self._pass(whole) if whole else []

    def _keep(self, text: str) -> list[OutputEvent]:
        self._held.append(text)
        return []


def _content(text: str) -> list[OutputEvent]:
    return [Content(text)]


def _may_be_json(opening: str) -> bool:
    return opening.lstrip("[")[:1] in ("{", '"')
