"""Covering sets, against the definition."""

from __future__ import annotations

import itertools

import pytest

from pegboard.conformance.covering import covering

PRODUCT = list(itertools.product("abcde", (1, 2, 3), (False, True), "xy"))


def met(cases: list[tuple[object, ...]], strength: int) -> set[object]:
    return {
        (places, tuple(case[place] for place in places))
        for case in cases
        for places in itertools.combinations(range(4), strength)
    }


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_every_combination_is_met(strength: int) -> None:
    chosen = covering(PRODUCT, strength)
    assert met([*chosen], strength) == met([*PRODUCT], strength)
    assert len(chosen) == len(set(chosen))
    # At least the product of the longest axes; greedy needs few more.
    least = {1: 5, 2: 15, 3: 30, 4: 60}[strength]
    assert least <= len(chosen) <= least * 1.4


def test_what_stands_beside_is_not_repeated() -> None:
    pairs = covering(PRODUCT)
    triples = covering(PRODUCT, 3, beside=pairs)
    assert not set(pairs) & set(triples)
    assert met([*pairs, *triples], 3) == met([*PRODUCT], 3)


def test_cases_that_are_left_out_are_not_needed() -> None:
    cases = [case for case in PRODUCT if case[0] != "a" or case[3] == "x"]
    assert met([*covering(cases)], 2) == met([*cases], 2)


def test_none() -> None:
    assert covering([]) == []
