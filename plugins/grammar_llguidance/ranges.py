"""Ranges of numbers as regular expressions, for bounds of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core.interfaces.json_value import JsonValue

Number = int | float

MAX_DIGITS = 64
"""Most digits of a bound: the parser of expressions allows so many groups within each other, and some more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest number that a schema allows, None for none; an open one is not allowed itself."""

    low: Number | None = None
    low_open: bool = False
    high: Number | None = None
    high_open: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, JsonValue]) -> Bounds:
        """Read the bounds of a schema. Raises ValueError for one that is not a number."""
        lows = [(_number(schema, word), word == "exclusiveMinimum") for word in ("minimum", "exclusiveMinimum")]
        highs = [(_number(schema, word), word == "exclusiveMaximum") for word in ("maximum", "exclusiveMaximum")]
        low, low_open = max(((value, is_open) for value, is_open in lows if value is not None), default=(None, False))
        high, high_open = min(
            ((value, is_open) for value, is_open in highs if value is not None),
            key=lambda bound: (bound[0], not bound[1]),
            default=(None, False),
        )
        return cls(low, low_open, high, high_open)

    def hold(self, value: JsonValue) -> bool:
        """Return whether a value is within; what is not a number is not bounded."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        return above and (self.high is None or value < self.high or (value == self.high and not self.high_open))


def integers(bounds: Bounds) -> str:
    """Return an expression of the integers within; "" where there are none."""
    low = None if bounds.low is None else math.ceil(bounds.low)
    high = None if bounds.high is None else math.floor(bounds.high)
    if low is not None and bounds.low_open and low == bounds.low:
        low += 1
    if high is not None and bounds.high_open and high == bounds.high:
        high -= 1
    if low is not None and high is not None and low > high:
        return ""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= -1 else -high
        parts.append(f"-({_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return "|".join(parts)


def numbers(bounds: Bounds) -> str:
    """As `integers`, with fractions. Raises ValueError for bounds with fractions."""
    low, high = _whole(bounds.low), _whole(bounds.high)
    parts = []
    if low is None or low < 0:
        least, is_open = (0, True) if high is None or high >= 0 else (-high, bounds.high_open)
        parts += _positive(least, is_open, None if low is None else -low, bounds.low_open)
        parts = [f"-({part})" for part in parts]
    if high is None or high >= 0:
        least, is_open = (0, False) if low is None or low < 0 else (low, bounds.low_open)
        parts += _positive(least, is_open, high, bounds.high_open)
    return "|".join(parts)


def _positive(low: int, low_open: bool, high: int | None, high_open: bool) -> list[str]:
    parts = []
    first = low + 1 if low_open else low
    if high is None or first < high:
        parts.append(f"({_naturals(first, None if high is None else high - 1)})(\\.[0-9]+)?")
    if low_open and (high is None or low < high):
        parts.append(f"{low}\\.[0-9]*[1-9][0-9]*")
    if high is not None and not high_open and first <= high:
        parts.append(f"{high}(\\.0+)?")
    return parts


def _naturals(low: int, high: int | None) -> str:
    """Return an expression of the integers from `low`, which is at least 0, to `high`."""
    first = str(low)
    if high is None:
        return f"{_at_least(first)}|[1-9][0-9]{{{len(first)},}}"
    last = str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    parts = [_at_least(first), _same_length("1" + "0" * (len(last) - 1), last)]
    if len(last) - len(first) > 1:
        parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """Return an expression of the digits from `low` to `high`."""
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    if same == len(low):
        return low
    rest = len(low) - same - 1
    parts = [low[same] + _at_least(low[same + 1 :]), high[same] + _at_most(high[same + 1 :])]
    if int(high[same]) - int(low[same]) > 1:
        parts.append(f"[{int(low[same]) + 1}-{int(high[same]) - 1}]{_any(rest)}")
    return f"{low[:same]}({'|'.join(parts)})"


def _at_least(digits: str) -> str:
    found = ""
    for rest, digit in enumerate(reversed(digits)):
        more = f"|[{int(digit) + 1}-9]{_any(rest)}" if digit != "9" else ""
        found = f"({digit}{found}{more})"
    return found


def _at_most(digits: str) -> str:
    found = ""
    for rest, digit in enumerate(reversed(digits)):
        more = f"|[0-{int(digit) - 1}]{_any(rest)}" if digit != "0" else ""
        found = f"({digit}{found}{more})"
    return found


def _any(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _number(schema: Mapping[str, JsonValue], word: str) -> Number | None:
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise ValueError(f"{word} must be a finite number")
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"{word} has more than {MAX_DIGITS} digits")
    return value


def _whole(value: Number | None) -> int | None:
    if value is None or value == int(value):
        return None if value is None else int(value)
    raise ValueError(f"a bound with a fraction, {value}, beside one beyond 2**53 is not supported")
