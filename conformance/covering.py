"""Cases that cover a product of settings: every pair, or every triple, of settings stands together in one of them.

Most faults need two settings to meet, few need three (Kuhn, Wallace and Gallo, 2004), and whole products take too long.
Tests take the pairs in `make test` and the triples in `make test-full`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case", bound="tuple[Hashable, ...]")


def covering(cases: Iterable[Case], strength: int = 2, *, beside: Sequence[Case] = ()) -> list[Case]:
    """Choose so many of `cases` that any `strength` settings that some case combines are combined in a chosen one.

    Cases are sequences of one length, a setting for each place. Those of `beside` count as chosen and are left out.
    Greedy and deterministic: the first of those that add most is next.
    """
    found = {case: _combinations(case, strength) for case in cases}
    missing = set().union(*found.values()) if found else set()
    for case in beside:
        missing -= _combinations(case, strength)
    chosen: list[Case] = []
    while missing:
        best = max(found, key=lambda case: len(found[case] & missing))
        chosen.append(best)
        missing -= found[best]
    return chosen


def _combinations(case: tuple[Hashable, ...], strength: int) -> set[object]:
    return set(itertools.combinations(enumerate(case), strength))
