"""JSON as models write it, a piece at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut
from pegboard.toolkit.parsing.json_stream import (
    MAX_DEPTH,
    MAX_NUMBER,
    as_object,
    is_beginning,
    read_string,
    read_value,
    without_lone_surrogates,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading, Source

_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=15,
)


def read(pieces: list[str], reading: Any = read_value) -> tuple[str, str]:
    """What was told, and what was left. Raises Broken."""
    source = Source()
    told: list[str] = []

    def run() -> Reading[None]:
        yield from reading(source, told.append)

    going = run()
    for piece in [*pieces, None]:
        if piece is None:
            source.ended = True
        else:
            source.push(piece)
        try:
            next(going)
        except StopIteration:
            return "".join(told), source.text[source.at :] + "".join(pieces[pieces.index(piece) + 1 :] if piece else [])
    raise AssertionError("it waits for more than there is")


@properties(max_examples=150)
@given(value=JSON, data=st.data())
def test_json_is_told_as_it_stands(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 2])))
    told, _ = read(data.draw(cut(text + " ")))
    assert told == text
    assert json.loads(told) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a\nb\tc\x01"', "a\nb\tc\x01"),
        (r'"C:\dir\x"', r"C:\dir\x"),
        (r'"it\'s"', "it's"),
        (r'"\u12"', r"\u12"),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\\\""', '\\"'),
        ("True", True),
        ("[None, False, true]", [None, False, True]),
        ('{"a" :\n1 , "b":[ ]}', {"a": 1, "b": []}),
        ("-0.5e+3", -500.0),
        ('{"a": [1, 2 , ], "b": {"c": 3,\n},}', {"a": [1, 2], "b": {"c": 3}}),
        ("{a: 1, $b_2 : {c:[]}}", {"a": 1, "$b_2": {"c": []}}),
        ("""{'a': 'it\\'s "x"', "b": ['y']}""", {"a": 'it\'s "x"', "b": ["y"]}),
        ("[NaN, Infinity, -Infinity]", [None, None, None]),
        ("1e400", float("inf")),
    ],
)
def test_slips_are_mended(text: str, value: Any) -> None:
    for pieces in ([text + " "], [*text, " "]):
        told, _ = read(pieces)
        assert json.loads(told) == value


@properties(max_examples=150)
@given(pieces=st.lists(st.sampled_from([r"\ud83d", r"\uDE00", r"\\", r"\n", "a", "ud83d", r"\u00e9"])), data=st.data())
def test_no_half_of_a_pair_is_told(pieces: list[str], data: st.DataObject) -> None:
    text = f'"{"".join(pieces)}"'
    found = json.loads(text).encode("utf-16-le", "surrogatepass")
    expected, place = "", 0
    while place < len(found):
        size = 4 if found[place + 1] & 0xFC == 0xD8 and found[place + 3 : place + 4] == b"\xde" else 2
        expected += found[place : place + size].decode("utf-16-le", "replace")
        place += size
    told, _ = read(data.draw(cut(text + " ")))
    assert json.loads(told) == expected
    assert json.loads(without_lone_surrogates(text)) == expected


def test_half_of_a_pair_at_the_end_of_the_text() -> None:
    source = Source()
    told: list[str] = []
    source.push(r'"a\ud83d')
    source.ended = True
    with pytest.raises(Broken):
        list(read_value(source, told.append))
    assert "".join(told) == r'"a\ufffd'


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "{", "[", '{"a"', '{"a":', '{"a":1', '{"a" 1}', "{a 1}", "{a", "[1 2]", "[,]",
        "[1,,]", "{,}", "[1}", "{-: 1}",
        '"open',
        "01", "1.", ".5", "+1", "1e", "--1", "-NaN", "-x", "tru", "nul", "1" * (MAX_NUMBER + 1),
        "'x", "]", "{" + "a" * 65 + ": 1}",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '"\\',
    ],
)  # fmt: skip
def test_what_is_no_json_is_broken(text: str) -> None:
    for pieces in ([text], list(text)):
        with pytest.raises(Broken):
            read(pieces)


@pytest.mark.parametrize("text", ['{"a": 1.2.3, "b"', '{"a": truly}', '["x\\', "[12x", '[{"k": nope', "[1e"])
def test_what_was_read_before_it_broke_was_told(text: str) -> None:
    source = Source()
    told: list[str] = []
    source.push(text)
    source.ended = True
    with pytest.raises(Broken):
        list(read_value(source, told.append))
    assert "".join(told) + source.text[source.at :] == text


def test_what_follows_is_left() -> None:
    assert read(["[1]", "2"]) == ("[1]", "2")
    assert read(["12", ",3"])[0] == "12"


def test_depth_is_bounded_and_reading_takes_no_stack() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read([*deep])[0] == deep


def test_strings() -> None:
    source = Source()
    source.push(r'"a\nb" rest')
    with pytest.raises(StopIteration) as stop:
        next(read_string(source))
    assert stop.value.value == "a\nb"


def test_objects_in_strings() -> None:
    assert as_object(' {"a": [1]} ') == '{"a": [1]}'
    for text in ("", "[1]", "5", '{"a"', '{"a": 1} x', "{} {}"):
        with pytest.raises(Broken):
            as_object(text)


@properties(max_examples=60)
@given(value=st.dictionaries(_TEXT, JSON, max_size=3), data=st.data())
def test_every_beginning_of_an_object_is_one(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    assert is_beginning(text[: data.draw(st.integers(0, len(text) - 1))])
    assert not is_beginning(text)


@pytest.mark.parametrize("text", ['{"a": Rome}', '{"a": "x"y', "{}x", "{oops}", "[1}", "}", '{"a" 1'])
def test_broken_json_is_no_beginning(text: str) -> None:
    assert not is_beginning(text)
