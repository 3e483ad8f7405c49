"""Where thoughts begin and end in an answer's text, as it comes."""

from __future__ import annotations

import re

from pegboard.plugins.thinking_budget.messages import Thoughts


class Watch:
    """Reads an answer. `thinking`: what comes next is of a thought. `over`: no thought comes any more."""

    def __init__(self, form: Thoughts) -> None:
        self.thinking, self.over = form.opened, False
        self._form = form
        self._tail = ""
        self._marks = {True: _finder(*form.ends), False: _finder(form.begin, form.answer)}
        self._longest = max(map(len, (form.begin, form.answer, *form.ends)))
        self.feed(form.text)

    def feed(self, text: str) -> None:
        """Read more."""
        self._tail += text
        while not self.over and self._find():
            pass

    def close(self) -> None:
        """Note that a thought was ended."""
        if self.thinking:
            self._ended()
            self._tail = ""

    def _find(self) -> bool:
        """Look for the next marker; whether there was one."""
        form, tail = self._form, self._tail
        if not (self.thinking or form.answer):
            # The only thought stands at the beginning.
            tail = tail.lstrip()
            self.over = not (tail.startswith(form.begin) or form.begin.startswith(tail))
        found = self._marks[self.thinking].search(tail)
        if found is None:
            self._tail = tail[1 - self._longest :] if self.thinking or form.answer else tail
            return False
        self._tail = tail[found.end() :]
        if self.thinking:
            self._ended()
        else:
            self.thinking = found.group() == form.begin
            self.over = not self.thinking
        return True

    def _ended(self) -> None:
        self.thinking, self.over = False, not self._form.answer


def _finder(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, filter(None, markers))))
