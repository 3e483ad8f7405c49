"""Regular expressions as xgrammar reads them: what it would ignore, and what it has to be told in other words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


def pattern_problem(pattern: str) -> str:
    """Return what of an expression the library would ignore; "" where nothing."""
    for at, char, inside in _scan(pattern):
        if inside:
            continue
        if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            return "it looks ahead or behind"
        if (char == "^" and at != 0) or (char == "$" and at != len(pattern) - 1):
            return f"{char!r} within an expression"
    return ""


def string_pattern_problem(pattern: str) -> str:
    """As `pattern_problem`, for the pattern of a JSON string. It is matched with the text between the quotes as it is
    written, so one of what has to be escaped there would break out of the string, or never match.
    """
    for _, char, inside in _scan(pattern):
        if inside != "[^" and (char == '"' or char in _ESCAPED or _escapes(char)):
            return f"it has {char!r}, which is written otherwise in JSON"
    return pattern_problem(pattern)


def plain_pattern(pattern: str) -> str:
    """Return the same pattern without optional groups, and without a least count of groups that can be empty: of an
    optional one that ends with a repetition, as in ``(x[0-9]+)?``, the library takes the end without the beginning
    (0.2.8).
    """
    ends = (at for at, char, inside in _scan(pattern) if char == ")" and not inside)
    optional = [at for at in ends if pattern[at + 1 : at + 2] == "?"]
    pattern = _with(pattern, ((at, at + (3 if pattern[at + 2 : at + 3] == "?" else 2), "|)") for at in optional))
    return _with(pattern, _repeated(pattern))


def dots_within_lines(pattern: str) -> str:
    """Return the same expression with each ``.`` as a class: the library's takes the end of a line, too."""
    dots = (at for at, char, inside in _scan(pattern) if char == "." and not inside)
    return _with(pattern, ((at, at + 1, "[^\\n]") for at in dots))


def _with(pattern: str, changes: Iterable[tuple[int, int, str]]) -> str:
    """Return a pattern with another text from each begin up to its end."""
    parts, last = list[str](), 0
    for begin, end, text in changes:
        parts += pattern[last:begin], text
        last = end
    return "".join(parts) + pattern[last:]


@dataclass
class _Group:
    """What is known of a group up to some place: whether its alternatives so far can be empty, and the latest one."""

    empty_before: bool = False
    empty: bool = True
    last: bool = True
    """Whether what a repetition would repeat can be empty."""

    def follow(self, last: bool) -> None:
        self.empty, self.last = self.empty and self.last, last

    def turn(self) -> None:
        """Begin another alternative."""
        self.empty_before, self.empty, self.last = self.can_be_empty(), True, True

    def can_be_empty(self) -> bool:
        return self.empty_before or (self.empty and self.last)


_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")


def _repeated(pattern: str) -> Iterator[tuple[int, int, str]]:
    """Yield changes that put ``*`` for each ``{n,}`` of a group that can be empty, which means the same: the library
    takes parts of such a group (0.2.8).
    """
    groups, begin = [_Group()], 0
    for at, char, inside in _scan(pattern):
        if inside or at < begin:
            continue
        group, count = groups[-1], _COUNT.match(pattern, at)
        if char == "(":
            groups.append(_Group())
            begin = at + (3 if pattern.startswith("(?:", at) else 1)
        elif char == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].follow(group.can_be_empty())
        elif char == "|":
            group.turn()
        elif count is not None:
            begin = count.end()
            if group.last and count[2] and not count[3]:
                yield at, begin, "*"
            group.last |= int(count[1]) == 0
        elif char in "*?+":
            # A second one makes the repetition lazy, which changes nothing about what can be empty.
            group.last |= char == "*" or (char == "?" and pattern[at - 1 : at] not in ("*", "?", "+", "}"))
        else:
            group.follow(char in ("^", "$", "\\b", "\\B"))


_ESCAPED = frozenset({"\\\\", "\\n", "\\r", "\\t", "\\f", "\\v", "\\b", "\\0", '\\"', "\\c"})


def _escapes(char: str) -> bool:
    """Return whether ``\\xHH`` or ``\\uHHHH`` names a character that JSON strings escape."""
    code = char[2:].strip("{}") if char.startswith(("\\x", "\\u")) else ""
    return bool(code) and (int(code, 16) < 0x20 or int(code, 16) in (0x22, 0x5C))


_CODE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|x\{[0-9A-Fa-f]+\})")


def _scan(pattern: str) -> Iterator[tuple[int, str, str]]:
    """Yield characters and escapes of an expression with their places, and whether they stand in a class: "[" or
    "[^".
    """
    at, inside = 0, ""
    while at < len(pattern):
        code = _CODE.match(pattern, at)
        size = len(code.group()) if code else 2 if pattern[at] == "\\" else 1
        char = pattern[at : at + size]
        if inside and char == "]":
            inside = ""
        elif not inside and char == "[":
            inside = "[^" if pattern.startswith("[^", at) else "["
            at += len(inside)
            if pattern.startswith("]", at):  # a bracket right after the opening one is a character of the class
                yield at, "]", inside
                at += 1
            continue
        yield at, char, inside
        at += size
