"""Text in pieces, read as if it were there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut, feed, one_by_one
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.output_parser import Content, ToolCallArguments, ToolCallStart
from pegboard.toolkit.parsing.text_stream import Broken, Reading, Sink, Source, TextStream, held_length


class Splits(TextStream):
    """Everything between markers is reasoning."""

    def run(self) -> Reading[None]:
        while (yield from self.content("<a>", "<abc>")):
            self.source.stop_record()
            yield from self.until(self.sink.reasoning, "</a>")


@properties()
@given(data=st.data())
def test_markers_are_found_however_they_are_cut(data: st.DataObject) -> None:
    text = "".join(
        data.draw(st.lists(st.sampled_from(["<a>", "<abc>", "</a>", "<", "<ab", "x", ">", "y z"]), max_size=9))
    )
    expected_content, expected_reasoning, rest = "", "", text
    while (found := re.search("<abc>|<a>", rest)) is not None:
        expected_content += rest[: found.start()]
        inside, _, rest = rest[found.end() :].partition("</a>")
        expected_reasoning += inside
    told = feed(Splits(), data.draw(cut(text)))
    assert (told.content, told.reasoning) == (expected_content + rest, expected_reasoning)


@pytest.mark.parametrize(
    ("text", "markers", "length"),
    [("ab<", ["<x>"], 1), ("ab<x", ["<x>"], 2), ("ab<x>", ["<x>"], 0), ("<<", ["<x>"], 1), ("<<", ["<<a", "<b"], 2),
     ("", ["<x>"], 0), ("aaaa", ["aab"], 2), ("x", ["x"], 0)],
)  # fmt: skip
def test_what_may_begin_a_marker_is_held_back(text: str, markers: list[str], length: int) -> None:
    assert held_length(text, 0, markers) == length


def test_a_reader_that_breaks_gives_back_what_it_recorded() -> None:
    class Breaks(TextStream):
        def run(self) -> Reading[None]:
            yield from self.content("!")
            yield from self.source.skip_space()
            raise Broken

    for pieces in (["a ! b!c"], one_by_one("a ! b!c")):
        assert feed(Breaks(), pieces).content == "a ! b!c"


def test_what_nobody_reads_is_content() -> None:
    class Lazy(TextStream):
        def run(self) -> Reading[None]:
            yield from self.source.expect("a")

    assert feed(Lazy(), one_by_one("abc")).content == "bc"


def test_sources() -> None:
    source = Source()
    source.push("ab")
    source.start_record("x")
    assert source.take(1) == "a"
    source.push("c")
    assert (source.text, source.at) == ("bc", 0)
    assert next(source.starts_with("bcd"), "over") is None
    source.ended = True
    with pytest.raises(StopIteration) as stop:
        next(source.starts_with("bcd"))
    assert stop.value.value is False
    assert source.stop_record() == "xa"
    assert source.stop_record() == ""


class TestSink:
    def test_pieces_become_one_event(self) -> None:
        sink = Sink()
        for text in ("a", "b ", "c"):
            sink.content(text)
        sink.start("f")
        sink.arguments("{")
        sink.arguments("}")
        assert sink.take() == [Content("ab c"), ToolCallStart(0, "f"), ToolCallArguments(0, "{}")]
        assert sink.take(last=True) == []

    @pytest.mark.parametrize(
        ("before", "after", "content"),
        [
            ("a ", " b", "a b"),
            ("a\n", "\n", "a"),
            (" ", " b", "b"),
            ("", "\n\n", ""),
            ("", "b ", "b "),
            ("a", "b", "ab"),
        ],
    )
    def test_white_space_around_calls(self, before: str, after: str, content: str) -> None:
        sink = Sink()
        sink.content(before)
        sink.start("f")
        sink.end()
        sink.content(after)
        assert "".join(one.text for one in sink.take(last=True) if isinstance(one, Content)) == content

    def test_a_call_that_has_begun_is_open_until_it_ends(self) -> None:
        sink = Sink()
        assert not sink.in_call
        sink.start("f")
        assert sink.in_call
        sink.end()  # type: ignore[unreachable]
        assert (sink.in_call, sink.calls) == (False, 1)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", "a\n"])
def test_a_name_that_no_function_can_have_is_none(name: str) -> None:
    class Named(CallStream):
        def run(self) -> Reading[None]:
            self.check(name)
            yield from ()

    with pytest.raises(Broken):
        list(Named().run())
