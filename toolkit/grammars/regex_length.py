"""How much text a regular expression can require, whichever library compiles it."""

from __future__ import annotations

import re

from pegboard.core.interfaces.errors import InvalidRequest

MAX_FORCED = 20_000
"""Characters that a grammar may leave no choice about, one after the other: code that looks for what is forced looks as
far ahead."""

MAX_COUNT = 100_000
"""Largest count of a repetition."""

_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)?", re.DOTALL)


def check_length(pattern: str, param: str) -> None:
    """Raise InvalidRequest, naming `param`, for an expression with enormous repetitions."""
    if forced_length(pattern, param) > MAX_FORCED:
        raise _refused(param, f"its repetitions ask for more than {MAX_FORCED} characters at once")


def forced_length(pattern: str, param: str = "regex") -> int:
    """Return the most characters that any part of an expression asks for at least: the sum over a sequence, the largest
    of several alternatives, times the least count of a repetition, which counts as one where it may be none.
    """
    outer: list[tuple[int, int]] = []  # of each open group: the longest alternative so far, and the sequence before it
    longest = total = last = 0
    at = 0
    while at < len(pattern):
        char = pattern[at]
        size = 1
        if char == "(":
            outer.append((longest, total + last))
            longest = total = last = 0
        elif char == ")":
            inner = max(longest, total + last)
            longest, total = outer.pop() if outer else (0, 0)
            last = inner
        elif char == "|":
            longest, total, last = max(longest, total + last), 0, 0
        elif char == "{" and (count := _COUNT.match(pattern, at)) is not None:
            size = len(count.group())
            numbers = [int(one) for one in count.groups() if one and len(one) < 20]
            if any(one > MAX_COUNT for one in numbers) or any(len(one or "") >= 20 for one in count.groups()):
                raise _refused(param, f"a repetition counts to more than {MAX_COUNT}")
            last *= max(1, numbers[0] if count[1] and numbers else 1)
        elif char not in "*+?^$":
            total, last = total + last, 1
            token = _ESCAPE.match(pattern, at) if char == "\\" else _CLASS.match(pattern, at) if char == "[" else None
            size = max(1, len(token.group())) if token is not None else 1
        at += size
    while outer:
        before, prefix = outer.pop()
        longest, total, last = before, prefix, max(longest, total + last)
    return max(longest, total + last)


def _refused(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param, code="grammar_too_large")
