"""Whether a token's spelling in a rendered conversation comes from the template or from a client.

Some tokens mean media to a model, and only a template may make them; a client's text that spells one is text. No
template has to know of this: what clients say is rendered with stand-ins for such spellings, and the spellings are put
back into the result.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

from pegboard.core.interfaces.json_value import JsonValue

_DIGITS = 40
_MARKED = 0xF0000
"""Where the private characters begin that stand for those of the first plane."""
_UNMARKED = {_MARKED + code: code for code in range(0x10000)}
_NAMES = frozenset(("role", "type"))
"""Keys whose values templates compare with words of their own."""

Found = tuple[int, str]
"""A spelling in a text, and where it begins."""


class Spellings:
    """Stand-ins for the spellings of reserved tokens in one conversation.

    A stand-in is a number of its own for each spelling, drawn for this conversation: digits pass through trimming,
    changes of case and JSON as they are.

    A spelling may also come about where texts meet. `mark` gives private characters to the edges of texts that could be
    part of one: what is still spelled then is the template's.
    """

    def __init__(self, reserved: Iterable[str]) -> None:
        spellings = sorted(filter(None, reserved), key=len, reverse=True)
        low = 10 ** (_DIGITS - 1)
        self._stand_ins = {one: str(low + secrets.randbelow(9 * low)) for one in spellings}
        self._spellings = {digits: one for one, digits in self._stand_ins.items()}
        self._pattern = _any_of(spellings)
        self._hidden = _any_of([*self._spellings])
        self._longest = max(map(len, spellings), default=0)
        self._all = "\0".join(spellings)
        self._begins = {one[:end] for one in spellings for end in range(1, len(one))}
        self._ends = {one[start:] for one in spellings for start in range(1, len(one))}
        self._firsts = frozenset(one[0] for one in spellings)
        self._lasts = frozenset(one[-1] for one in spellings)

    def hide(self, value: JsonValue) -> JsonValue:
        """Return a client's value with stand-ins for the spellings in its texts, keys included."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, dict):
            return {str(self.hide(name)): self.hide(one) for name, one in value.items()}
        return [self.hide(one) for one in value] if isinstance(value, list) else value

    def find(self, text: str) -> list[Found]:
        """Return the spellings that a text has, apart from those behind stand-ins."""
        return [(match.start(), match[0]) for match in self._pattern.finditer(text)]

    def show(self, text: str, joined: Sequence[Found] = ()) -> tuple[str, list[tuple[int, int]]]:
        """Return a rendered text with the spellings back in it, and the ranges of characters that are clients' text:
        those spellings, and the `joined` ones, which are where `find` says.
        """
        hidden = [(match.start(), match.end(), self._spellings[match[0]]) for match in self._hidden.finditer(text)]
        pieces: list[str] = []
        literals: list[tuple[int, int]] = []
        at = length = 0
        for start, end, spelling in sorted([*hidden, *((start, start + len(one), one) for start, one in joined)]):
            pieces += (text[at:start], spelling)
            length += start - at
            literals.append((length, length + len(spelling)))
            at, length = end, length + len(spelling)
        return "".join([*pieces, text[at:]]), literals

    def restored(self, text: str) -> str:
        """Return a message with the spellings back in it."""
        return self.show(text)[0]

    # ---- spellings that come together -----------------------------------------------------------------------------

    def mark(self, value: JsonValue) -> JsonValue:
        """Return a client's value, hidden already, with private characters for those at the edges of its texts that may
        belong to a spelling which what stands next to it completes. A text keeps its length.
        """
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {name: one if name in _NAMES else self.mark(one) for name, one in value.items()}
        return [self.mark(one) for one in value] if isinstance(value, list) else value

    def unmarked(self, text: str) -> str:
        """Return a text without the private characters of `mark`."""
        return text.translate(_UNMARKED)

    def _mark_text(self, text: str) -> str:
        # Templates trim, so that the text's neighbour may be next to the first character that is not blank.
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        last = start + len(core) - 1
        inside = len(core) < self._longest and core in self._all
        if inside or self._is_edge(core[: self._longest], self._ends, self._lasts, from_start=True):
            text = _marked(text, start)
        if inside or self._is_edge(core[-self._longest :], self._begins, self._firsts, from_start=False):
            text = _marked(text, last)
        return text

    @staticmethod
    def _is_edge(edge: str, pieces: set[str], needed: frozenset[str], *, from_start: bool) -> bool:
        if needed.isdisjoint(edge):
            return False
        lengths = range(1, len(edge) + 1)
        return any((edge[:length] if from_start else edge[-length:]) in pieces for length in lengths)


def counted(found: Iterable[Found]) -> Counter[str]:
    """Return how often there is each spelling."""
    return Counter(spelling for _, spelling in found)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # Without any it matches nothing.
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _marked(text: str, at: int) -> str:
    code = ord(text[at])
    return text if code > 0xFFFF else f"{text[:at]}{chr(_MARKED + code)}{text[at + 1 :]}"
