"""What stop_regex relies on in Python's private parser. A Python that changes it fails here, by the element."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from pegboard.plugins.stop_expressions.re_internals import constants, matcher_of, parse

c = constants


def plain(items: Any) -> list[Any]:
    """A parsed pattern with lists where it has sequences of its own."""

    def of(value: Any) -> Any:
        if type(value).__name__ == "SubPattern":
            return plain(value)
        return [of(one) for one in value] if isinstance(value, (list, tuple)) else value

    return [(op, of(av)) for op, av in items]


@pytest.mark.parametrize(
    ("pattern", "elements"),
    [
        ("a", [(c.LITERAL, 97)]),
        ("[^a]", [(c.NOT_LITERAL, 97)]),
        (".", [(c.ANY, None)]),
        ("[a-c]", [(c.IN, [[c.RANGE, [97, 99]]])]),
        ("[^ab]", [(c.IN, [[c.NEGATE, None], [c.LITERAL, 97], [c.LITERAL, 98]])]),
        (r"\d", [(c.IN, [[c.CATEGORY, c.CATEGORY_DIGIT]])]),
        (r"\D", [(c.IN, [[c.CATEGORY, c.CATEGORY_NOT_DIGIT]])]),
        (r"\s", [(c.IN, [[c.CATEGORY, c.CATEGORY_SPACE]])]),
        (r"\S", [(c.IN, [[c.CATEGORY, c.CATEGORY_NOT_SPACE]])]),
        (r"\w", [(c.IN, [[c.CATEGORY, c.CATEGORY_WORD]])]),
        (r"\W", [(c.IN, [[c.CATEGORY, c.CATEGORY_NOT_WORD]])]),
        ("a*", [(c.MAX_REPEAT, [0, c.MAXREPEAT, [(c.LITERAL, 97)]])]),
        ("a{2,5}?", [(c.MIN_REPEAT, [2, 5, [(c.LITERAL, 97)]])]),
        ("ab|cd", [(c.BRANCH, [None, [plain(parse("ab")), plain(parse("cd"))]])]),
        ("(a)", [(c.SUBPATTERN, [1, 0, 0, [(c.LITERAL, 97)]])]),
        ("(?i-s:a)", [(c.SUBPATTERN, [None, int(re.I), int(re.S), [(c.LITERAL, 97)]])]),
        ("^", [(c.AT, c.AT_BEGINNING)]),
        (r"\A", [(c.AT, c.AT_BEGINNING_STRING)]),
        ("$", [(c.AT, c.AT_END)]),
        (r"\b", [(c.AT, c.AT_BOUNDARY)]),
        (r"\B", [(c.AT, c.AT_NON_BOUNDARY)]),
    ],
)
def test_the_elements_of_patterns(pattern: str, elements: list[Any]) -> None:
    assert plain(parse(pattern)) == elements


@pytest.mark.parametrize(
    ("pattern", "op"),
    [
        ("(?=a)", c.ASSERT),
        ("(?!a)", c.ASSERT_NOT),
        (r"(a)\1", c.GROUPREF),
        ("(a)?(?(1)b|c)", c.GROUPREF_EXISTS),
        ("(?>a)", c.ATOMIC_GROUP),
        ("a*+", c.POSSESSIVE_REPEAT),
    ],
)
def test_the_elements_that_are_refused(pattern: str, op: Any) -> None:
    assert parse(pattern)[-1][0] is op


def test_what_always_fails_has_a_name_of_its_own_in_some_pythons() -> None:
    assert parse("(?!)")[0][0] in (c.ASSERT_NOT, c.FAILURE)


def test_flags_stand_in_the_state() -> None:
    assert parse("(?im)a").state.flags == re.I | re.M | re.U


@pytest.mark.parametrize(
    ("pattern", "error"),
    [("(", re.error), ("a{99999999999}", OverflowError), ("(" * 9999 + ")" * 9999, RecursionError)],
)
def test_what_is_no_pattern(pattern: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(pattern)


def test_what_is_dubious_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning):
            parse("[[a]")


@pytest.mark.parametrize(
    ("pattern", "flags", "yes", "no"),
    [("k", re.I, "K\u212a", "j"), ("[a-c]", re.I, "aBc", "d"), ("[^a]", re.I, "b", "aA")],
)
def test_one_element_by_itself(pattern: str, flags: int, yes: str, no: str) -> None:
    op, av = parse(pattern)[0]
    matches = matcher_of(op, av, flags | re.U)
    assert all(matches(char) for char in yes)
    assert not any(matches(char) for char in no)
