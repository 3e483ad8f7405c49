"""Stop expressions mean what they mean in `re`; what could run away is refused."""

from __future__ import annotations

import re

import pytest

from pegboard.plugins.stop_expressions.matcher import RegexMatcher
from pegboard.plugins.stop_expressions.program import MAX_STATES, Program, StopRegexError


@pytest.mark.parametrize(
    "one", [r"\d", r"\s", r"\w", r"\W", r"[^\s\d]", r"(?a:\d)", r"(?a:\s)", r"(?a:\w)", ".", "(?i:k)", "(?i:[a-zß])"]
)
def test_single_characters_are_those_of_re(one: str) -> None:
    program, exact = Program([one]), re.compile(one)
    for code in (*range(0x2200), *range(0xFF00, 0xFFFF), *range(0x1D7C0, 0x1D800), *range(0x1F600, 0x1F610)):
        matches = RegexMatcher(program).read(chr(code)) is not None
        assert matches == (exact.fullmatch(chr(code)) is not None), hex(code)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "not a regular expression"),
        ("a{5,2}", "not a regular expression"),
        ("[z-a]", "not a regular expression"),
        ("a{99999999999999}", "not a regular expression"),
        ("(?L)a", "not a regular expression"),
        ("(" * 900 + "a" + ")" * 900, "nested"),
        ("(" * 40 + "a" + ")" * 40, "nested more than 32"),
        ("a(?=b)", "look-around"),
        ("a(?!b)", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("a(?!)", "look-around"),
        (r"(a|b)\1", "back references"),
        ("(?P<x>a)(?P=x)", "back references"),
        ("(a)?b(?(1)c|d)", "conditions"),
        ("(?>a+)b", "atomic groups"),
        ("a++b", "possessive"),
        ("a$", "not known"),
        (r"a\Z", "not known"),
        ("a*", "empty text"),
        ("(a|b?)", "empty text"),
        ("^", "empty text"),
        (r"\b", "empty text"),
        ("", "empty text"),
        ("()", "empty text"),
        ("a{2000}", "2001 states"),
        ("((a{100}){100}){100}", "1000001 states"),
        (".{0,5000}x", "states"),
        ("(?i)[\u4e00-\u9fff]", "too wide to ignore case"),
    ],
)
def test_refused(pattern: str, reason: str) -> None:
    with pytest.raises(StopRegexError, match=reason) as caught:
        Program([pattern])
    assert len(str(caught.value)) < 300


def test_all_patterns_together_are_bounded() -> None:
    pattern = f"a{{{MAX_STATES // 2}}}"
    Program([pattern])
    with pytest.raises(StopRegexError, match="together"):
        Program([pattern, pattern.replace("a", "b")])


def test_characters_remembered_are_bounded() -> None:
    program = Program([r"\w+!"])
    matcher = RegexMatcher(program)
    for code in range(0x4E00, 0x4E00 + 5000):
        assert matcher.read(chr(code)) is None
    assert len(program._passed) <= 1024
    assert matcher.undecided == 5000
