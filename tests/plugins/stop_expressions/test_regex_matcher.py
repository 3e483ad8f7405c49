"""Stop expressions end where `re` says, wherever the text is cut."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.plugins.stop_expressions.matcher import RegexMatcher
from pegboard.plugins.stop_expressions.program import Program, StopRegexError
from pegboard.plugins.stop_expressions.stage import compiled
from pegboard.toolkit.text.stop import StopMatcher

LETTERS = "abA \n1_"

_ATOMS = st.sampled_from(
    ["a", "b", "A", r"\n", ".", "[ab]", "[^a]", "[a-b1]", r"\d", r"\w", r"\s", r"\W", r"[\s1]", r"[^\w ]", "(?i:a)",
     "(?i:[^a])", "(?s:.)", r"\b", r"\B", "^", "(?m:^)", "(?m:$)"]
)  # fmt: skip


def stop_matcher(stops: Sequence[str], patterns: Sequence[str] = (), **more: bool) -> StopMatcher:
    return StopMatcher(stops, [compiled(tuple(patterns))] if patterns else [], **more)


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = inner.map(lambda one: f"(?:{one})")
    repeat = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(group, repeat).map("".join),
    )


PATTERNS = st.recursive(_ATOMS, _combine, max_leaves=6)
TEXTS = st.text(LETTERS, max_size=14)


def usable(patterns: list[str]) -> bool:
    try:
        compiled(tuple(patterns))
    except StopRegexError as error:
        return "matches the empty text" not in str(error) and pytest.fail(str(error))
    return True


def ends_at(pattern: str, text: str, end: int) -> int | None:
    """Where the longest match of `pattern` that ends at `end` begins."""
    exact = re.compile(rf"(?:{pattern})(?<=\A[\s\S]{{{end}}})")
    return next((start for start in range(end + 1) if exact.match(text, start)), None)


def oracle(patterns: list[str], text: str) -> tuple[int, int] | None:
    """(start, end) of the match that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        starts = [start for one in patterns if (start := ends_at(one, text, end)) is not None]
        if starts:
            return min(starts), end
    return None


def found_in(patterns: list[str], text: str) -> tuple[int, int] | None:
    matcher = RegexMatcher(Program(patterns))
    for at, char in enumerate(text):
        for end, find in ((at, matcher.before), (at + 1, matcher.read)):
            if (found := find(char)) is not None:
                return end - found[0], end
    return None


@settings(max_examples=400, deadline=None)
@given(patterns=st.lists(PATTERNS, min_size=1, max_size=3).filter(usable), text=TEXTS)
def test_ends_where_re_says(patterns: list[str], text: str) -> None:
    found, expected = found_in(patterns, text), oracle(patterns, text)
    looks_ahead = re.search(r"\\[bB]|\$", "".join(patterns))
    if expected is not None and expected[1] == len(text) and found is None:
        # What follows decides, and nothing does.
        assert looks_ahead
        expected = None
    elif expected is not None and found is not None and found[1] == expected[1] and found[0] > expected[0]:
        # What follows decides about the longer match; the other one is known at its end.
        assert looks_ahead
        assert found[0] in [ends_at(one, text, found[1]) for one in patterns]
        expected = found
    assert found == expected


def test_a_match_that_is_known_does_not_wait() -> None:
    """For a longer one that ends in the same place, if what follows allows it."""
    assert found_in(["a", r".a\B"], "1a1") == (1, 2)
    assert found_in(["a", ".a"], "1a1") == (0, 2)


@settings(max_examples=200, deadline=None)
@given(
    patterns=st.lists(PATTERNS, min_size=1, max_size=2).filter(usable),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=2),
    text=TEXTS,
    cuts=st.lists(st.integers(0, 14), max_size=4),
    include=st.booleans(),
)
def test_the_cut_does_not_matter(
    patterns: list[str], stops: list[str], text: str, cuts: list[int], include: bool
) -> None:
    def shown(pieces: list[str]) -> tuple[str, str | None]:
        matcher, said = stop_matcher(stops, patterns, include_stop=include), ""
        for piece in pieces:
            said += matcher.feed(piece)[0]
        return said + matcher.flush(), matcher.matched

    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert shown(pieces) == shown([text]) == shown(list(text))


@settings(max_examples=200, deadline=None)
@given(pattern=PATTERNS.filter(lambda one: usable([one])), text=TEXTS, more=TEXTS)
def test_nothing_leaves_that_belongs_to_a_match(pattern: str, text: str, more: str) -> None:
    """What has been shown stands before the match, whatever follows."""
    matcher = stop_matcher([], [pattern])
    shown = "".join(matcher.feed(char)[0] for char in text)
    if matcher.matched is not None:
        return
    match = oracle([pattern], text + more)
    assert match is None or len(shown) <= match[0]
    # Nor is anything held back from which no match can begin: each held text is the beginning of a thread.
    held = text[len(shown) :]
    assert shown + held == text
    assert matcher.flush() == held


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), text=st.text("ab ", max_size=20))
def test_strings_and_expressions_of_the_same_text_agree(stops: list[str], text: str) -> None:
    assert stop_matcher(stops).feed(text)[0] == stop_matcher([], stops).feed(text)[0]
    assert stop_matcher(stops[:1], stops[1:]).feed(text)[0] == stop_matcher(stops).feed(text)[0]


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\d+\.", "It is 17. No", "It is "),
        (r"\n\n+User:", "yes\n\n\nUser: more", "yes"),
        (r"(?i)the end", "so: The END.", "so: "),
        (r"\bend\b", "bend ender end.", "bend ender "),
        (r"\bend\b", "the end", "the end"),
        (r"(?m)^#+ ", "a # b\n## c", "a # b\n"),
        (r"(?m)ok$", "okay\nok\nmore", "okay\n"),
        (r"a.*b", "xa\nayb", "xa\n"),
        (r"(?s)a.*b", "xa\nayb", "x"),
        (r"colou?r", "colouur color", "colouur "),
        (r"[^\x00-\x7f]", "plain é", "plain "),
        (r"(?a)\w\W", "é1 a!", "é"),
        (r"(?x) a b  # spaced", "xaby", "x"),
        ("(?i)straße|\u017fx", "STRASSE SX", "STRASSE "),
        (r"(?i)[k-k]", "\u212a", ""),  # the Kelvin sign, to which `re` folds a k
        (r"x{3,5}y", "xxxxxxxy", "xx"),
    ],
)
def test_examples(pattern: str, text: str, shown: str) -> None:
    for pieces in ([text], list(text)):
        matcher = stop_matcher([], [pattern])
        said = "".join(matcher.feed(piece)[0] for piece in pieces)
        assert said + matcher.flush() == shown
        assert matcher.matched == (pattern if shown != text else None)


def test_the_pattern_that_matched_is_named() -> None:
    matcher = stop_matcher(["zzz"], ["[ab]+c", "ac"])
    assert matcher.feed("xxac") == ("xx", "[ab]+c")
    both = stop_matcher(["ac"], ["ac"])
    assert both.feed("ac") == ("", "ac")


def test_an_ignored_match_is_text() -> None:
    matcher = stop_matcher(["END"], [r"a+"])
    assert matcher.feed("xaaENDE", ignore=True) == ("xaaEND", None)
    assert matcher.feed("ND", ignore=True) == ("END", None)
    assert matcher.feed("ba") == ("b", "a+")


def test_an_ignored_match_before_a_character_does_not_swallow_it() -> None:
    matcher = stop_matcher([], [r"\w+\b", r"\.a"])
    assert matcher.feed("it.", ignore=True) == ("it", None)
    assert matcher.feed("a") == ("", r"\.a")


def test_the_beginning_stays_the_beginning() -> None:
    matcher = stop_matcher([], ["^ab"])
    assert matcher.feed("ab", ignore=True) == ("ab", None)
    assert matcher.feed("ab") == ("ab", None)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*x", "(.*a){12}", "((a?){30}a{30})b"])
def test_no_pattern_runs_away(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step looks at each state once at most: `re` needs exponential time for these."""
    program = Program([pattern])
    looks = 0

    class Counted(list):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().__getitem__(key)  # type: ignore[call-overload]

    program.ops = Counted(program.ops)
    matcher = RegexMatcher(program)
    for char in "a" * 500:
        if (matcher.before(char) or matcher.read(char)) is not None:
            break
    assert 0 < looks <= 501 * 2 * len(program.ops)
