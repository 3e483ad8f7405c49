"""Text of outputs: nothing of a stop string leaves, whatever the tokens are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.frontend.outputs import OutputState, merge
from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.text.stop import StopMatcher

STOP: dict[str, Any] = {"type": "stop", "matched": "END"}
LENGTH: dict[str, Any] = {"type": "length"}


def state(**sampling: Any) -> OutputState:
    request = TokenizedRequest(rid="r", prompt=b"", sampling=SamplingParams(**sampling))
    return OutputState(request, FakeTokenizer())


def out(text: str, finish: dict[str, Any] | None = None) -> TokenOutput:
    return TokenOutput(rid="r", token_ids=[ord(char) for char in text], finish_reason=finish)


def test_text_passes() -> None:
    one = state()
    assert [one.push(out("ab")).text, one.push(out("c", LENGTH)).text] == ["ab", "c"]


def test_what_may_begin_a_stop_string_waits() -> None:
    one = state(stop=("END",))
    assert [one.push(out(text)).text for text in ("aE", "N", "x", "E")] == ["a", "", "ENx", ""]
    assert one.push(out("N")).text == ""
    assert one.push(out("D", STOP)).text == ""


def test_held_text_leaves_at_the_end() -> None:
    one = state(stop=("END",))
    one.push(out("aEN"))
    assert one.push(out("", LENGTH)).text == "EN"


def test_text_behind_a_stop_string_is_dropped() -> None:
    one = state(stop=("END",))
    assert one.push(out("aE")).text == "a"
    assert one.push(out("NDxyz", STOP)).text == ""


def test_stop_string_stays_where_asked() -> None:
    one = state(stop=("END",), no_stop_trim=True)
    assert one.push(out("aEN")).text == "a"
    assert one.push(out("Dxyz", STOP)).text == "END"


def test_an_ignored_stop_string_is_text() -> None:
    one = state(stop=("END",), min_new_tokens=5)
    assert one.push(out("aENDb")).text == "aENDb"
    assert one.push(out("cEND", STOP)).text == "c"


def test_matched_token_is_no_text() -> None:
    assert state().push(out("ab!", {"type": "stop", "matched": ord("!")})).text == "ab"
    assert state(no_stop_trim=True).push(out("ab!", {"type": "stop", "matched": ord("!")})).text == "ab!"


def test_special_tokens_are_skipped_unless_wanted() -> None:
    assert state().push(out("a\x03b", LENGTH)).text == "ab"
    assert state(skip_special_tokens=False).push(out("a\x03b", LENGTH)).text == "a\x03b"


def test_counters_and_logprobs_stay_with_their_tokens() -> None:
    output = TokenOutput(
        rid="r", token_ids=[97], prompt_tokens=3, completion_tokens=1, cached_tokens=2, num_retractions=1,
        logprobs=[(-0.5, 97, [])],
    )  # fmt: skip
    chunk = state(stop=("ab",)).push(output)
    assert (chunk.text, chunk.token_ids, chunk.logprobs) == ("", [97], [(-0.5, 97, [])])
    assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, chunk.num_retractions) == (3, 1, 2, 1)


def test_merged_outputs_are_one() -> None:
    first = TokenOutput(rid="r", token_ids=[1], completion_tokens=1, logprobs=[(-1.0, 1, [])])
    second = TokenOutput(rid="r", token_ids=[2], completion_tokens=2, finish_reason=LENGTH, logprobs=[(-2.0, 2, [])])
    both = merge(first, second)
    assert (both.token_ids, both.completion_tokens, both.finish_reason) == ([1, 2], 2, LENGTH)
    assert both.logprobs == [(-1.0, 1, []), (-2.0, 2, [])]


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
def test_agrees_with_the_schedulers_matcher(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    end = len(text)
    for i, char in enumerate(text):
        if matcher.feed(char)[1] is not None:
            end = i + 1
            break
    finish = {"type": "stop", "matched": matcher.matched} if matcher.matched else LENGTH
    expected = text[: end - len(matcher.matched)] if matcher.matched else text

    one, sent, at = state(stop=tuple(stops)), "", 0
    for cut in [*cuts, len(text)]:
        upto = min(at + cut, end)
        chunk = one.push(out(text[at:upto], finish if upto == end else None))
        sent, at = sent + chunk.text, upto
        assert expected.startswith(sent), "text left that has to be trimmed"
        if upto == end:
            break
    assert sent == expected


def test_an_ignored_stop_string_is_text_in_one_piece_too() -> None:
    one = state(stop=("END",), min_new_tokens=5)
    assert one.push(out("aENDbcEND", STOP)).text == "aENDbc"
