"""Where thoughts begin and end in an answer's text, as it comes."""

from __future__ import annotations

import re
from typing import Protocol


class ThoughtMarks(Protocol):
    """How thoughts are marked, as `pegboard.toolkit.parsing.output_parser.ThoughtForm` has it."""

    @property
    def begin(self) -> str: ...

    @property
    def ends(self) -> tuple[str, ...]: ...

    @property
    def opened(self) -> bool: ...

    @property
    def answer(self) -> str: ...


class Watch:
    """Reads an answer, which begins with `text`. `thinking`: what comes next is of a thought. `over`: no thought comes
    any more.
    """

    def __init__(self, marks: ThoughtMarks, text: str = "") -> None:
        self.thinking, self.over = marks.opened, False
        self.rest = ""
        """The end of the text, with which a marker may begin: a watch that is told what was found, and reads this, goes
        on as this one does.
        """
        self._marks = marks
        self._finders = {True: _finder(*marks.ends), False: _finder(marks.begin, marks.answer)}
        self._longest = max(map(len, (marks.begin, marks.answer, *marks.ends)))
        self.feed(text)

    def feed(self, text: str) -> None:
        """Read more."""
        self.rest += text
        while not self.over and self._find():
            pass

    def close(self) -> None:
        """Note that a thought was ended."""
        if self.thinking:
            self._ended()
            self.rest = ""

    def _find(self) -> bool:
        """Look for the next marker; whether there was one."""
        marks, text = self._marks, self.rest
        if not (self.thinking or marks.answer):
            # The only thought stands at the beginning.
            text = text.lstrip()
            self.over = not (text.startswith(marks.begin) or marks.begin.startswith(text))
            if self.over:
                self.rest = ""
                return False
        found = self._finders[self.thinking].search(text)
        if found is None:
            several = self.thinking or marks.answer
            self.rest = text[max(0, len(text) - self._longest + 1) :] if several else text
            return False
        self.rest = text[found.end() :]
        if self.thinking:
            self._ended()
        else:
            self.thinking = found.group() == marks.begin
            self.over = not self.thinking
        if self.over:
            self.rest = ""
        return True

    def _ended(self) -> None:
        self.thinking, self.over = False, not self._marks.answer


def _finder(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, filter(None, markers))))
