"""Stand-ins for spellings of tokens, on their own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.toolkit.chat.provenance import Spellings

RESERVED = ("<i>", "<i><pad>", "ii", "[é]")


@properties(200)
@given(st.lists(st.sampled_from((*RESERVED, "<", "i", ">", "7", "\n", "漢", "\U000f0041")), max_size=8).map("".join))
def test_what_is_hidden_comes_back(text: str) -> None:
    spellings = Spellings(RESERVED)
    hidden = str(spellings.hide(text))
    assert spellings.find(hidden) == []
    shown, literals = spellings.show(hidden)
    assert shown == text == spellings.restored(hidden)
    found = [(start, start + len(one)) for start, one in spellings.find(text)]
    assert literals == found
    assert len(str(spellings.mark(hidden))) == len(hidden)


def test_the_longest_spelling_counts() -> None:
    spellings = Spellings(RESERVED)
    assert spellings.show(str(spellings.hide("a<i><pad>"))) == ("a<i><pad>", [(1, 9)])


def test_stand_ins_are_of_one_conversation() -> None:
    assert Spellings(RESERVED).hide("<i>") != Spellings(RESERVED).hide("<i>")


def test_values_keep_their_shape() -> None:
    spellings = Spellings(("<i>",))
    mark = str(spellings.hide("<i>"))
    value: Any = {"role": "<i>", "<i>": ["x<i>", 1, None, True, 1.5, {"a": "<i>"}]}
    assert spellings.hide(value) == {"role": mark, mark: [f"x{mark}", 1, None, True, 1.5, {"a": mark}]}


def test_only_edges_that_could_be_part_of_a_spelling_are_marked() -> None:
    spellings = Spellings(("<i>",))
    for text in ("a <b", "b> c", "", " ", "who", "<i", "> a"):
        changed = str(spellings.mark(text)) != text
        assert changed == (text in ("<i", "> a")), text
        assert spellings.unmarked(str(spellings.mark(text))) == text
    assert spellings.mark({"role": "i", "type": "<", "text": "i"}) == {
        "role": "i",
        "type": "<",
        "text": spellings.mark("i"),
    }


def test_nothing_is_reserved() -> None:
    spellings = Spellings(())
    assert spellings.show(str(spellings.hide("<i>"))) == ("<i>", [])
    assert spellings.find("<i>") == []
