"""Stop strings, matched in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


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
    """Finds the first of several stop strings in a text fed piece by piece, and holds back what might begin one.

    The result does not depend on how the text was cut: the match that ends first wins, the longest of those that end
    together. Time is linear in the text times the number of stop strings, whatever they look like (Knuth, Morris,
    Pratt 1977). Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        # Longest first: of two that end at the same character the longer one is met first.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; None so far."""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if it ended here.

        With a match, the text is what stood before it (and the stop string itself with `include_stop`); what follows it
        in the piece is dropped, and later calls return nothing.
        """
        if self.matched is not None:
            return "", self.matched
        buffer = self._held + piece
        if not self._stops:
            return buffer, None
        for index, char in enumerate(piece, start=len(self._held)):
            found = self._advance(char)
            if found is not None:
                self.matched = found
                self._held = ""
                end = index + 1
                return buffer[: end if self._include else end - len(found)], found
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
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
