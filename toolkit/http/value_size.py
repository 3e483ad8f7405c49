"""How much memory the values of a request take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

NUMBER_BYTES = 32
"""One number, beside its place in a list."""
_NUMBERS = {int, float, bool}


def memory_of(value: object) -> int:
    """Return bytes of a value with all that is in it; about, because equal parts may be one. Lists of numbers, which
    are the longest, take no step per number.
    """
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += sys.getsizeof(one)
        if isinstance(one, Mapping):
            total += sum(map(sys.getsizeof, one))
            left += one.values()
        elif isinstance(one, Sequence) and not isinstance(one, str | bytes):
            if _NUMBERS.issuperset(map(type, one)):
                total += NUMBER_BYTES * len(one)
            else:
                left += one
        elif hasattr(one, "__dict__"):
            left.append(vars(one))
    return total
