"""Regular expressions that end an output, compiled into an automaton that `matcher` runs.

Python's own parser reads them, so they mean what they mean in `re`. What an automaton cannot do is refused:
look-around, back references, conditions, atomic groups, and the end of the text, which is unknown while it is being
written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.plugins.stop_expressions.re_internals import Element, Name, constants, matcher_of, parse

MAX_STATES = 1024
"""Most states of all patterns together: what one character costs at worst, since each has at most one thread."""

MAX_DEPTH = 32
"""Deepest nesting of groups."""

MAX_FOLDED = 4096
"""Most characters in ranges whose case is ignored, all together: each is folded when a pattern is compiled."""

_REMEMBERED = 1024
"""Characters of which a program remembers what they match."""

CHAR, SPLIT, JUMP, AT, MATCH = range(5)
"""What the states of a program do: read a character, go two ways or one, check a condition, end a match."""

_REFUSED = {
    constants.ASSERT: "look-around",
    constants.ASSERT_NOT: "look-around",
    constants.FAILURE: "look-around",
    constants.GROUPREF: "back references",
    constants.GROUPREF_EXISTS: "conditions",
    constants.ATOMIC_GROUP: "atomic groups",
    constants.POSSESSIVE_REPEAT: "possessive repeats",
}
_REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)
_TYPES = re.ASCII | re.LOCALE | re.UNICODE


class StopRegexError(ValueError):
    """A pattern that cannot end an output; the message says why."""


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


def _is_ascii_word(char: str) -> bool:
    return char.isascii() and _is_word(char)


_CATEGORIES: dict[tuple[Name, bool], Callable[[str], bool]] = {
    (constants.CATEGORY_DIGIT, False): str.isdecimal,
    (constants.CATEGORY_SPACE, False): str.isspace,
    (constants.CATEGORY_WORD, False): _is_word,
    (constants.CATEGORY_DIGIT, True): "0123456789".__contains__,
    (constants.CATEGORY_SPACE, True): " \t\n\r\f\v".__contains__,
    (constants.CATEGORY_WORD, True): _is_ascii_word,
}
_OPPOSITES: dict[Name, Name] = {
    constants.CATEGORY_NOT_DIGIT: constants.CATEGORY_DIGIT,
    constants.CATEGORY_NOT_SPACE: constants.CATEGORY_SPACE,
    constants.CATEGORY_NOT_WORD: constants.CATEGORY_WORD,
}


@dataclass(frozen=True, slots=True)
class _At:
    """A condition on the characters before and after a place, None where the text begins."""

    holds: Callable[[str | None, str], bool]
    looks_ahead: bool


def _boundary(word: Callable[[str], bool], there: bool) -> _At:
    return _At(lambda prev, following: ((prev is not None and word(prev)) != word(following)) is there, True)


_AT_START = _At(lambda prev, following: prev is None, False)
_AT_LINE_START = _At(lambda prev, following: prev is None or prev == "\n", False)
_AT_LINE_END = _At(lambda prev, following: following == "\n", True)


class Program:
    """Several patterns as one automaton. Immutable but for what it remembers of characters.

    `ops` are its states, `args` what they mean: which test a character must pass, where to go on (two places for a
    split), a condition, or the number of the pattern that has matched.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self.ops: list[int] = []
        self.args: list[Any] = []
        self._tests: list[Callable[[str], bool]] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._repeated: dict[tuple[Name, int, int], int] = {}
        self._passed: dict[str, bytes] = {}
        self._folded = 0
        self.entries: list[int] = []
        for number, pattern in enumerate(patterns):
            self._add_pattern(number, pattern)

    def passed(self, char: str) -> bytes:
        """Per test, 1 where a character passes it and 0 elsewhere: a byte each, since a thousand of these are kept."""
        found = self._passed.get(char)
        if found is None:
            if len(self._passed) >= _REMEMBERED:
                self._passed.clear()
            found = bytes([test(char) for test in self._tests])
            self._passed[char] = found
        return found

    def _add_pattern(self, number: int, pattern: str) -> None:
        try:
            parsed = parse(pattern)
        except (re.error, OverflowError, RecursionError, Warning) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise StopRegexError(f"{_shown(pattern)} is not a regular expression: {reason}") from None
        try:
            size = _size(parsed, 0) + 1
            if len(self.ops) + size > MAX_STATES:
                raise StopRegexError(
                    f"it has {size} states with its repeats written out; all patterns together may have {MAX_STATES}"
                )
            if _may_be_empty(parsed):
                raise StopRegexError("it matches the empty text, so it would end every output at once")
            self.entries.append(len(self.ops))
            self._repeated.clear()
            self._sequence(parsed, parsed.state.flags)
            self._emit(MATCH, number)
        except StopRegexError as error:
            raise StopRegexError(f"{_shown(pattern)}: {error}") from None

    def _emit(self, op: int, arg: Any) -> int:
        self.ops.append(op)
        self.args.append(arg)
        return len(self.ops) - 1

    def _sequence(self, items: Iterable[Element], flags: int) -> None:
        for op, av in items:
            if op is constants.SUBPATTERN:
                _, add, remove, inner = av
                self._sequence(inner, _combined(flags, add, remove))
            elif op is constants.BRANCH:
                self._branch(av[1], flags)
            elif op in _REPEATS:
                self._repeat(av, flags)
            elif op is constants.AT:
                self._emit(AT, _condition(av, flags))
            else:
                # A class within a repeat comes again and again: it is the same object, and costly to spell out.
                same = (op, id(av), flags)
                if same not in self._repeated:
                    self._repeated[same] = self._test(op, av, flags)
                self._emit(CHAR, self._repeated[same])

    def _branch(self, branches: Sequence[Iterable[Element]], flags: int) -> None:
        ends = []
        for branch in branches[:-1]:
            split = self._emit(SPLIT, None)
            self._sequence(branch, flags)
            ends.append(self._emit(JUMP, None))
            self.args[split] = (split + 1, len(self.ops))
        self._sequence(branches[-1], flags)
        for end in ends:
            self.args[end] = len(self.ops)

    def _repeat(self, av: tuple[int, int, Sequence[Element]], flags: int) -> None:
        """Greedy or not: which texts match is the same, and the shortest one ends the output in any case."""
        least, most, inner = av
        if _size(inner, 0) == 0:
            return
        for _ in range(least):
            self._sequence(inner, flags)
        if most is constants.MAXREPEAT:
            split = self._emit(SPLIT, None)
            self._sequence(inner, flags)
            self._emit(JUMP, split)
            self.args[split] = (split + 1, len(self.ops))
            return
        splits = []
        for _ in range(most - least):
            splits.append(self._emit(SPLIT, None))
            self._sequence(inner, flags)
        for split in splits:
            self.args[split] = (split + 1, len(self.ops))

    def _test(self, op: Name, av: Any, flags: int) -> int:
        """Return the number of a test of one character, the same for equal ones."""
        key = (str(op), repr(av), flags)
        number = self._numbers.get(key)
        if number is None:
            if op is constants.IN and flags & re.IGNORECASE:
                self._folded += sum(one[1] - one[0] + 1 for kind, one in av if kind is constants.RANGE)
            if self._folded > MAX_FOLDED:
                raise StopRegexError(f"its ranges are too wide to ignore case; they may hold {MAX_FOLDED} characters")
            number = self._numbers[key] = len(self._tests)
            self._tests.append(_make_test(op, av, flags))
        return number


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 64 else f"{pattern[:64]}...")


def _combined(flags: int, add: int, remove: int) -> int:
    """Read the flags within a group such as (?i-s:...)."""
    if add & _TYPES:
        flags &= ~_TYPES
    return (flags | add) & ~remove


def _size(items: Iterable[Element], depth: int) -> int:
    """States of the automaton, counted and not built. Raises StopRegexError for what an automaton cannot do."""
    if depth > MAX_DEPTH:
        raise StopRegexError(f"it is nested more than {MAX_DEPTH} deep")
    size = 0
    for op, av in items:
        if op in _REFUSED:
            raise StopRegexError(f"{_REFUSED[op]} cannot be used in a stop_regex")
        if op is constants.SUBPATTERN:
            size += _size(av[3], depth + 1)
        elif op is constants.BRANCH:
            size += sum(_size(branch, depth + 1) for branch in av[1]) + 2 * (len(av[1]) - 1)
        elif op in _REPEATS:
            least, most, inner = av
            one = _size(inner, depth + 1)
            optional = one + 2 if most is constants.MAXREPEAT else (most - least) * (one + 1)
            size += least * one + optional if one else 0
        else:
            size += 1
    return size


def _may_be_empty(items: Iterable[Element]) -> bool:
    """Return whether a match may have no character, wherever its conditions hold."""
    for op, av in items:
        if op is constants.SUBPATTERN:
            empty = _may_be_empty(av[3])
        elif op is constants.BRANCH:
            empty = any(_may_be_empty(branch) for branch in av[1])
        elif op in _REPEATS:
            empty = av[0] == 0 or _may_be_empty(av[2])
        else:
            empty = op is constants.AT
        if not empty:
            return False
    return True


def _condition(av: Name, flags: int) -> _At:
    if av is constants.AT_BEGINNING_STRING or (av is constants.AT_BEGINNING and not flags & re.MULTILINE):
        return _AT_START
    if av is constants.AT_BEGINNING:
        return _AT_LINE_START
    if av is constants.AT_END and flags & re.MULTILINE:
        return _AT_LINE_END
    if av in (constants.AT_BOUNDARY, constants.AT_NON_BOUNDARY):
        word = _is_ascii_word if flags & re.ASCII else _is_word
        return _boundary(word, av is constants.AT_BOUNDARY)
    raise StopRegexError(
        "the end of the text is not known while it is being written; with (?m) a $ stands for the end of a line"
    )


def _make_test(op: Name, av: Any, flags: int) -> Callable[[str], bool]:
    """Return whether one character matches one element of a pattern."""
    if op is constants.ANY:
        return (lambda char: True) if flags & re.DOTALL else (lambda char: char != "\n")
    if flags & re.IGNORECASE:
        return _folded_test(op, av, flags)
    if op is constants.LITERAL:
        return chr(av).__eq__
    if op is constants.NOT_LITERAL:
        return chr(av).__ne__
    if op is constants.IN:
        return _class_test(av, bool(flags & re.ASCII))
    raise StopRegexError(f"{str(op).lower()} cannot be used in a stop_regex")


def _category(name: Name, ascii_only: bool) -> Callable[[str], bool]:
    return _CATEGORIES[_OPPOSITES.get(name, name), ascii_only]


def _class_test(members: Sequence[Element], ascii_only: bool) -> Callable[[str], bool]:
    """Read a class such as [^a-z\\d]."""
    negated = members[0][0] is constants.NEGATE
    literals = frozenset(chr(av) for op, av in members if op is constants.LITERAL)
    ranges = [(chr(av[0]), chr(av[1])) for op, av in members if op is constants.RANGE]
    categories = [(_category(av, ascii_only), av not in _OPPOSITES) for op, av in members if op is constants.CATEGORY]

    def test(char: str) -> bool:
        inside = (
            char in literals
            or any(low <= char <= high for low, high in ranges)
            or any(belongs(char) is there for belongs, there in categories)
        )
        return inside is not negated

    return test


def _folded_test(op: Name, av: Any, flags: int) -> Callable[[str], bool]:
    """Case is ignored as `re` does it, by a pattern of this one element."""
    matches = matcher_of(op, av, flags)
    return lambda char: matches(char) is not None
