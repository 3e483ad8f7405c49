"""Stop strings, and what stages bring to end an output by its text, matched in text that arrives in pieces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from pegboard.core.interfaces.stops import CompiledStops


def _learn(pattern: str, table: array[int], n: int) -> None:
    """Write down, for the first n >= 2 characters of the pattern, the longest proper prefix that is also a suffix.

    Tables are filled as far as a text has matched: a pattern costs nothing until it begins. What is written depends on
    nothing else, so threads and answers may share a table.
    """
    length = table[n - 1]
    while length and pattern[n - 1] != pattern[length]:
        length = table[length]
    table[n] = length + 1 if pattern[n - 1] == pattern[length] else length


def _unknown(pattern: str) -> array[int]:
    table = array("i", b"\xff" * (4 * (len(pattern) + 1)))
    table[0] = table[1] = 0
    return table


class Stops:
    """Stop strings, compiled. All answers that have the same ones share it (`compiled`).

    `strings` are sorted, longest first, so that of two that end at the same character the longer one is met first.
    """

    __slots__ = ("__weakref__", "firsts", "strings", "tables")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self.strings = tuple(sorted(dict.fromkeys(strings), key=len, reverse=True))
        self.tables = tuple(map(_unknown, self.strings))
        self.firsts = frozenset(stop[0] for stop in self.strings)


_in_use: WeakValueDictionary[tuple[str, ...], Stops] = WeakValueDictionary()


@lru_cache(maxsize=64)
def compiled(strings: tuple[str, ...]) -> Stops:
    """Return the compiled form of these, made once however many answers have them: it is found as long as one of them
    is in use, and some that were used last besides. Raises ValueError for an empty stop string.
    """
    found = _in_use.get(strings)
    if found is None:
        found = _in_use[strings] = Stops(strings)
    return found


class StopPrefixes:
    """Where each of several stop strings stands in a text: how much of it the text ends with (Knuth, Morris, Pratt
    1977). Time is linear in the text times the number of strings, whatever they look like.
    """

    __slots__ = ("_busy", "_states", "_stops")

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._states = [0] * len(stops.strings)
        self._busy = False
        """Whether some string has begun."""

    @property
    def longest(self) -> int:
        """Length of the longest end of the text with which some string begins, all of it not being there."""
        return max(self._states) if self._busy else 0

    def skips(self, piece: str) -> bool:
        """Return whether no string has begun, and none begins in this piece: then it need not be fed."""
        return not self._busy and self._stops.firsts.isdisjoint(piece)

    def feed(self, piece: str) -> None:
        """Go on by some text, taking no notice of strings that are complete in it."""
        if self.skips(piece):
            return
        states = self._states
        for i, (stop, table) in enumerate(zip(self._stops.strings, self._stops.tables, strict=True)):
            state = states[i]
            for char in piece:
                while state and stop[state] != char:
                    state = table[state]
                if stop[state] == char:
                    state += 1
                    if table[state] < 0:
                        _learn(stop, table, state)
                    if state == len(stop):
                        state = table[state]
            states[i] = state
        self._busy = any(states)

    def advance(self, char: str) -> str | None:
        """Go on by one character; the longest string that it completes."""
        found: str | None = None
        states = self._states
        for i, (stop, table) in enumerate(zip(self._stops.strings, self._stops.tables, strict=True)):
            state = states[i]
            while state and stop[state] != char:
                state = table[state]
            if stop[state] == char:
                state += 1
                if table[state] < 0:
                    _learn(stop, table, state)
                if state == len(stop):
                    found = found or stop
                    state = table[state]
            states[i] = state
        self._busy = any(states)
        return found

    def restart(self) -> None:
        """Forget what has begun."""
        if self._busy:
            self._states = [0] * len(self._states)
            self._busy = False


class StopMatcher:
    """Finds the first of several stop strings, and of what stages match, in a text fed piece by piece, and holds back
    what might begin one.

    The result does not depend on how the text was cut: the match that ends first wins, the longest of those that end
    together. Time is linear in the text times the number of stop strings, whatever they look like, and times the steps
    of what stages bring. Raises what `compiled` raises.
    """

    def __init__(
        self, stops: Sequence[str], others: Sequence[CompiledStops] = (), *, include_stop: bool = False
    ) -> None:
        self._prefixes = StopPrefixes(compiled(tuple(stops)))
        self.compiled = tuple(others)  # kept, so that other answers find it
        self._others = [one.matcher() for one in others]
        self._include = include_stop
        self._held = ""
        self._fed = 0
        self.matched: str | None = None
        """The stop string, or what a stage calls its match; None so far."""

    def feed(self, piece: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Return text that may be shown now, and what has matched here, if anything has.

        With a match, the text is what stood before it (and the matched text itself with `include_stop`); what follows
        it in the piece is dropped, and later calls return nothing. With `ignore` a match that is complete within this
        piece is text like any other, and no part of it belongs to a later one.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._others and self._prefixes.skips(piece):
            # Nothing was held back either.
            self._fed += len(piece)
            return piece, None
        buffer, begins = self._held + piece, self._fed - len(self._held)
        for char in piece:
            found = self._advance(char)
            while found is not None:
                start, end, matched = found
                if not ignore:
                    self.matched = matched
                    self._held = ""
                    return buffer[: (end if self._include else start) - begins], matched
                self._restart()
                # A match that had to see what follows has not read it.
                found = self._advance(char) if end < self._fed + 1 else None
            self._fed += 1
        keep = self._prefixes.longest
        for one in self._others:
            keep = max(keep, one.undecided)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return what was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        self._restart()
        return held

    def _restart(self) -> None:
        self._prefixes.restart()
        for one in self._others:
            one.restart()

    def _advance(self, char: str) -> tuple[int, int, str] | None:
        """(start, end, what has matched) of a match that this character completes, or shows to be complete."""
        end = self._fed
        best: tuple[int, str] | None = None
        for one in self._others:
            if (found := one.before(char)) is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            end += 1
            if (stop := self._prefixes.advance(char)) is not None:
                best = len(stop), stop
            for one in self._others:
                if (found := one.read(char)) is not None and (best is None or found[0] > best[0]):
                    best = found
        return None if best is None else (end - best[0], end, best[1])
