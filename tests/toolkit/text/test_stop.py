"""Stop strings are found wherever the text is cut, and no part of one is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.toolkit.text.stop import StopMatcher, StopPrefixes, compiled

TEXT = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed_all(matcher: StopMatcher, parts: list[str]) -> tuple[str, str | None]:
    shown = ""
    for part in parts:
        text, matched = matcher.feed(part)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


@given(parts=st.lists(st.text("ab\n", max_size=5), max_size=12), stops=STOPS)
def test_equals_the_naive_search(parts: list[str], stops: list[str]) -> None:
    assert feed_all(StopMatcher(stops), parts) == naive("".join(parts), stops)


@given(text=TEXT, stops=STOPS)
def test_holds_back_no_more_than_might_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, char in enumerate(text, start=1):
        piece, matched = matcher.feed(char)
        shown += piece
        if matched is not None:
            return
        held = text[len(shown) : at]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_stop_string_may_be_kept() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.feed("one EN") == ("one ", None)
    assert matcher.feed("D two") == ("END", "END")
    assert matcher.matched == "END"
    assert matcher.feed("three") == ("", "END")


def test_no_stop_strings_hold_nothing() -> None:
    assert StopMatcher([]).feed("text") == ("text", None)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_repetitive_patterns_are_linear() -> None:
    class Counted(str):
        compared = 0

        def __getitem__(self, key: object) -> str:
            Counted.compared += 1
            return super().__getitem__(key)  # type: ignore[index]

    matcher = StopMatcher([Counted("a" * 999 + "b")])
    Counted.compared = 0
    text = "a" * 5000
    assert "".join(matcher.feed(char)[0] for char in text) + matcher.flush() == text
    assert Counted.compared < 4 * len(text)


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_prefixes_say_how_much_might_be_a_beginning(text: str, stops: list[str], cut: int) -> None:
    prefixes = StopPrefixes(compiled(tuple(stops)))
    prefixes.feed(text[:cut])
    prefixes.feed(text[cut:])
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert prefixes.longest == max(begun, default=0)
