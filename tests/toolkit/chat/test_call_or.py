"""Answers that are calls, or something else."""

from __future__ import annotations

import pytest

from pegboard.conformance.streams import Told, feed, one_by_one
from pegboard.toolkit.chat.call_or import CallOrStream
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.text_stream import Reading


class Bracketed(CallStream):
    """Calls in angle brackets, or calls that are the answer."""

    def run(self) -> Reading[None]:
        if (yield from self.source.peek()) == "{":
            yield from self.attempt(self.read_call(strict=True))
        while (yield from self.content("<<")):
            yield from self.attempt(self.read_call())
            yield from self.content(">>")
            self.leave_out_marker()


CALL = '{"name": "f", "arguments": {"a": 1}}'
OPENINGS = ("<< {", '{"name": "f", "arguments": {')


def read(text: str, openings: tuple[str, ...] = OPENINGS) -> Told:
    whole = feed(CallOrStream(Bracketed([{"name": "f"}]), openings), [text])
    assert feed(CallOrStream(Bracketed([{"name": "f"}]), openings), one_by_one(text)) == whole
    return whole


@pytest.mark.parametrize("text", [f"<<{CALL}>>", f" <<{CALL}>>", CALL, f"<<{CALL}", CALL.replace(" ", "\n")])
def test_calls(text: str) -> None:
    found = read(text)
    assert (found.content.strip(), found.loaded) == ("", [("f", {"a": 1})])


@pytest.mark.parametrize(
    "text",
    [
        f'{{"x": "<<{CALL}>>"}}', f"x<<{CALL}>>", "", " ", "<", '{"name": "f", "arguments"', "<<[]>>", "<" * 50,
        f"{CALL} and more", CALL.replace('"f"', '"g"'), CALL[:-1] + ', "x": 1}', f"[{CALL}]", '{"name": "f"}',
    ],
)  # fmt: skip
def test_all_else_is_content_to_the_last_character(text: str) -> None:
    found = read(text)
    assert (found.content, found.calls) == (text, ())


def test_a_call_that_is_cut_off_has_what_is_there() -> None:
    assert read(CALL[:-3]).calls == (("f", '{"a": '),)
    assert read(f"<<{CALL[:-3]}").calls == (("f", '{"a": '),)


def test_what_it_is_is_told_as_soon_as_it_is_known() -> None:
    stream = CallOrStream(Bracketed([{"name": "f"}]), OPENINGS)
    assert not stream.feed(' {"na')
    assert feed(stream, ['ming": 1']).content == ' {"naming": 1'
    stream = CallOrStream(Bracketed([{"name": "f"}]), OPENINGS)
    assert stream.feed(f"<<{CALL[:-3]}"), "a call that can be nothing else is told as it comes"
