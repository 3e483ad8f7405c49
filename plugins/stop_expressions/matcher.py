"""Matching of stop expressions in linear time, in text that arrives in pieces.

A Thompson automaton ("Regular expression search algorithm", 1968) has a thread per state at most, so that no pattern
and no text can make it run away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.plugins.stop_expressions.program import CHAR, JUMP, MATCH, SPLIT

if TYPE_CHECKING:
    from pegboard.plugins.stop_expressions.program import Program


class RegexMatcher:
    """Runs a program over text, character by character. Threads are kept in the order of where they began."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._seen = [0] * len(program.ops)
        self._round = 0
        self._position = 0
        self._previous: str | None = None
        self._threads: list[tuple[int, int]] = []
        self._waiting = False
        """Whether some thread stands before a condition on the character to come."""
        self._found: tuple[int, int] | None = None
        self.restart()

    @property
    def undecided(self) -> int:
        """How many of the latest characters might be the beginning of a match."""
        return self._position - self._threads[0][1] if self._threads else 0

    def restart(self) -> None:
        """Forget every match that has begun. What stood before still counts as what stood before."""
        self._next_round()
        self._begin()

    def before(self, char: str) -> tuple[int, str] | None:
        """(length, pattern) of the match that ends before this character, which it had to see; the character counts as
        not read yet.
        """
        if not self._waiting:
            return None
        threads = self._threads
        self._next_round()
        for state, start in threads:
            self._follow(state, start, self._previous, char)
        return self._match()

    def read(self, char: str) -> tuple[int, str] | None:
        """(length, pattern) of the match that ends with this character, the longest of those that do."""
        args, threads = self._program.args, self._threads
        passed = self._program.passed(char)
        self._next_round()
        for state, start in threads:
            if passed[args[state]]:
                self._follow(state + 1, start, char, None)
        self._position += 1
        self._previous = char
        found = None if self._found is None else self._match()
        self._begin()
        return found

    def _match(self) -> tuple[int, str] | None:
        if self._found is None:
            return None
        start, number = self._found
        return self._position - start, self._program.patterns[number]

    def _begin(self) -> None:
        """Begin a thread per pattern, after all that have begun."""
        for entry in self._program.entries:
            self._follow(entry, self._position, self._previous, None)

    def _next_round(self) -> None:
        self._threads, self._waiting, self._found = [], False, None
        self._round += 1

    def _follow(self, state: int, start: int, previous: str | None, following: str | None) -> None:
        """Follow a thread from here to all states that it reaches without a character. The first to reach one keeps it:
        none that comes later began earlier.
        """
        ops, args, seen, number = self._program.ops, self._program.args, self._seen, self._round
        stack = [state]
        while stack:
            state = stack.pop()
            if seen[state] == number:
                continue
            seen[state] = number
            op = ops[state]
            if op == CHAR:
                self._threads.append((state, start))
            elif op == SPLIT:
                stack += args[state]
            elif op == JUMP:
                stack.append(args[state])
            elif op == MATCH:
                if self._found is None or (start, args[state]) < self._found:
                    self._found = (start, args[state])
            elif args[state].looks_ahead and following is None:
                self._waiting = True
                self._threads.append((state, start))
            elif args[state].holds(previous, following or ""):
                stack.append(state + 1)
