"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.tools.bench.events import EventSplitter

STREAM = (
    b": a comment\n\n"
    b'data: {"choices": [{"text": " a"}]}\n\n'
    b"data:no space\n\n"
    b"event: message\nid: 1\ndata: named\n\n"
    b"data: two\ndata: lines\n\n"
    b"data: \xc3\xa9\xe2\x82\xac\n\n"
    b"\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"choices": [{"text": " a"}]}', b"no space", b"named", b"two\nlines", "é€".encode(), b"[DONE]"]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def read(parts: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    found = [event for part in parts for event in splitter.feed(part)]
    return found, splitter.rest


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_cuts_do_not_matter(places: list[int]) -> None:
    assert read(cut(STREAM, places)) == (EVENTS, b"")


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_neither_do_other_ends_of_lines(places: list[int]) -> None:
    assert read(cut(STREAM.replace(b"\n", b"\r\n"), places)) == (EVENTS, b"")


@pytest.mark.parametrize("data", [STREAM, STREAM.replace(b"\n", b"\r\n")])
def test_byte_by_byte(data: bytes) -> None:
    assert read([data[i : i + 1] for i in range(len(data))]) == (EVENTS, b"")


def test_an_event_at_a_time() -> None:
    parts = [part + b"\n\n" for part in STREAM.split(b"\n\n")]
    assert read(parts)[0] == EVENTS


def test_several_at_once_keep_their_order() -> None:
    numbers = [b"data: %d\n\n" % number for number in range(1000)]
    rng = random.Random(0)
    data = b"".join(numbers)
    parts = cut(data, [rng.randrange(len(data)) for _ in range(300)])
    assert read(parts)[0] == [b"%d" % number for number in range(1000)]


def test_what_has_not_ended_is_left() -> None:
    assert read([b"data: a\n\ndata: b"]) == ([b"a"], b"data: b")
