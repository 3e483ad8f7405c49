"""Stop strings and stop expressions, matched in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.core.toolkit.stop_regex import RegexMatcher, compile_stops


def _failure_table(pattern: str) -> list[int]:
    """Per prefix length n >= 1: the longest proper prefix of the pattern that is also a suffix of its first n chars."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for n in range(2, len(pattern) + 1):
        while length and pattern[n - 1] != pattern[length]:
            length = table[length]
        if pattern[n - 1] == pattern[length]:
            length += 1
        table[n] = length
    return table


class StopMatcher:
    """Finds the first of several stop strings and expressions in a text fed piece by piece, and holds back what might
    begin one.

    The result does not depend on how the text was cut: the match that ends first wins, the longest of those that end
    together. Time is linear in the text times the number of stop strings, whatever they look like (Knuth, Morris,
    Pratt 1977), and times the size of the expressions (see `stop_regex`). Raises ValueError for an empty stop string
    and StopRegexError, which is one, for an expression that cannot be used.
    """

    def __init__(self, stops: Sequence[str], patterns: Sequence[str] = (), *, include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        # Longest first: of two that end at the same character the longer one is met first.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._patterns = tuple(patterns)
        self._regex = RegexMatcher(compile_stops(self._patterns)) if patterns else None
        self._include = include_stop
        self._held = ""
        self._fed = 0
        self.matched: str | None = None
        """The stop string, or the pattern, that was found; None so far."""

    def feed(self, piece: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string or the pattern if one has matched here.

        With a match, the text is what stood before it (and the matched text itself with `include_stop`); what follows
        it in the piece is dropped, and later calls return nothing. With `ignore` a match that is complete within this
        piece is text like any other, and no part of it belongs to a later one.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops and self._regex is None:
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
        keep = max(self._states, default=0)
        if self._regex is not None:
            keep = max(keep, self._regex.undecided)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        self._restart()
        return held

    def _restart(self) -> None:
        self._states = [0] * len(self._stops)
        if self._regex is not None:
            self._regex.restart()

    def _advance(self, char: str) -> tuple[int, int, str] | None:
        """(start, end, what has matched) of a match that this character completes, or shows to be complete."""
        best: tuple[int, int, str] | None = None
        if self._regex is not None and (found := self._regex.advance(char)) is not None:
            start, end, number = found
            best = (start, end, self._patterns[number])
            if end <= self._fed:
                return best
        stop = self._advance_strings(char)
        if stop is not None and (best is None or self._fed + 1 - len(stop) <= best[0]):
            best = (self._fed + 1 - len(stop), self._fed + 1, stop)
        return best

    def _advance_strings(self, char: str) -> str | None:
        found: str | None = None
        for i, stop in enumerate(self._stops):
            state, table = self._states[i], self._tables[i]
            while state and stop[state] != char:
                state = table[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found or stop
                state = table[state]
            self._states[i] = state
        return found
